"""The guide drafts what it forces, and the model checks several tokens in one pass."""

from transformers import AutoModelForCausalLM, AutoTokenizer

import gd_plugin as gd
from gd_plugin.testing.real_model import smollm2_folder

SCHEMA = {
    "type": "object",
    "properties": {"temperature_in_celsius": {"enum": [10, 20, 30]}, "is_it_raining": {"type": "boolean"}},
    "required": ["temperature_in_celsius", "is_it_raining"],
}


def main() -> None:
    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    processor = gd.GuidedLogitsProcessor(
        gd.Guide.json_schema(SCHEMA),
        tokenizer=tokenizer,
        model=model,
        whitespace="compact",  # optional blanks would end a forced run
        canonical_forcing=True,  # keys in the tokenizer's own spelling: they need no pass at all
    )
    drafting = gd.grammar_drafting()
    inputs = tokenizer("It is warm and dry. As JSON: ", return_tensors="pt")
    options = {"max_new_tokens": 40, "do_sample": False, "logits_processor": processor}

    plain = model.generate(**inputs, **options)
    print(processor.results(plain)[0].text, f"in {processor.results(plain)[0].num_tokens} forward passes")
    drafted = model.generate(**inputs, **options, custom_generate=drafting)
    print(processor.results(drafted)[0].text, f"in {drafting.num_forwards} forward passes")


if __name__ == "__main__":
    main()
