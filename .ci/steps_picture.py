"""Draw what a guide does to a real model's steps: docs/images/steps.svg.

In:  SmolLM2 and a guide.      Out: a column a step with the tokens the model prefers, those the guide bans struck out.

    python .ci/steps_picture.py docs/images/steps.svg
"""

import sys
from pathlib import Path
from xml.sax.saxutils import escape

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import gd_plugin as gd
from gd_plugin.testing.real_model import smollm2_folder

PROMPT = "Great food, slow service. Review as JSON: "
SCHEMA = {
    "type": "object",
    "properties": {"food": {"enum": ["good", "bad"]}, "fast": {"type": "boolean"}},
    "required": ["food", "fast"],
}
STEPS, SHOWN = 8, 5  # columns; most likely tokens in each
COLUMN, LINE, TOP = 112, 21, 46  # pixels


def main() -> None:
    """Generate greedily under the guide and draw the steps."""
    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    guide = gd.Guide.json_schema(SCHEMA)
    processor = gd.GuidedLogitsProcessor(guide, tokenizer=tokenizer, model=model, whitespace="compact")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(
        **inputs,
        max_new_tokens=40,
        do_sample=False,
        logits_processor=processor,
        output_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
    )
    generated = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    Path(sys.argv[1]).write_text(draw(tokenizer, out.logits, out.scores, generated))
    print(processor.results(out)[0])


def draw(tokenizer: object, logits: list[torch.Tensor], scores: list[torch.Tensor], generated: list[int]) -> str:
    """Return the SVG: for each step the likeliest tokens, and the one taken."""
    parts = []
    steps = min(STEPS, len(generated))
    for step in range(steps):
        left = 8 + step * COLUMN
        chances = torch.softmax(logits[step][0].float(), dim=-1)
        best = chances.topk(SHOWN).indices.tolist()
        taken = generated[step]
        shown = best if taken in best else [*best[:-1], taken]
        parts.append(_text(left + COLUMN / 2 - 4, 18, f"step {step + 1}", "#777", 11, "middle"))
        for place, token in enumerate(shown):
            legal = bool(scores[step][0, token] > float("-inf"))
            y = TOP + place * LINE
            if token == taken:
                parts.append(
                    f'<rect x="{left}" y="{y - 15}" width="{COLUMN - 8}" height="{LINE - 2}" rx="4" fill="#d7f0dd"/>'
                )
            colour = "#1a7f37" if token == taken else "#333" if legal else "#b3261e"
            text = _shown(tokenizer.decode([token]))  # type: ignore[attr-defined]
            line = "" if legal else ' text-decoration="line-through"'
            parts.append(_text(left + 5, y, text, colour, 13, "start", f' font-family="monospace"{line}'))
            chance = float(chances[token])
            parts.append(
                _text(left + COLUMN - 12, y, f"{100 * chance:.0f} %" if chance >= 0.005 else "<1 %", "#777", 10, "end")
            )
    bottom = TOP + SHOWN * LINE + 14
    text = tokenizer.decode(generated, skip_special_tokens=True)  # type: ignore[attr-defined]
    parts.append(_text(8, bottom, f"{PROMPT.strip()} {text}", "#333", 12, "start"))
    legend = "SmolLM2-135M, greedy. Struck out: likelier, but banned by the guide. Green: taken."
    parts.append(_text(8, bottom + 18, legend, "#777", 12, "start"))
    width, height = 16 + steps * COLUMN, bottom + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" rx="8" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _shown(text: str) -> str:
    text = text.replace("\n", "⏎").replace(" ", "␣")
    return text if len(text) <= 8 else text[:7] + "…"


def _text(x: float, y: float, text: str, colour: str, size: int, anchor: str, more: str = "") -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}"{more}>{escape(text)}</text>'


if __name__ == "__main__":
    main()
