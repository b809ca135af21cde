"""Free text first, then a guided answer: what reasoning models need."""

from transformers import AutoModelForCausalLM, AutoTokenizer

import gd_plugin as gd
from gd_plugin.testing.real_model import smollm2_folder


def main() -> None:
    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    answer = gd.Guide.choice(["yes", "no"])
    # after 20 tokens of thought the end marker is forced, so that the answer always comes
    guide = answer.with_reasoning(end="</think>", max_tokens=20)
    processor = gd.GuidedLogitsProcessor(guide, tokenizer=tokenizer, model=model)

    # the prompt opens the thought; a model that opens it itself is served by with_reasoning(start="<think>")
    inputs = tokenizer("Is water wet? Think, then answer yes or no. <think>", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False, logits_processor=processor)

    thought, _, said = (processor.results(output)[0].text or "").partition("</think>")
    print(f"thought: {thought!r}\nanswer:  {said!r}")


if __name__ == "__main__":
    main()
