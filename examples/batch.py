"""A batch in which every prompt has its own guide, or none."""

from transformers import AutoModelForCausalLM, AutoTokenizer

import gd_plugin as gd
from gd_plugin.testing.real_model import smollm2_folder


def main() -> None:
    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")  # generation goes on at the right
    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    prompts = {
        "Great food, slow service. Stars, from 1 to 5: ": gd.Guide.regex("[1-5]"),
        "The capital of France is": None,  # unguided: its scores stay as they are, bit for bit
        "The first moon landing was on (YYYY-MM-DD) ": gd.Guide.regex("(19|20)[0-9]{2}-[0-9]{2}-[0-9]{2}"),
    }
    processor = gd.GuidedLogitsProcessor(list(prompts.values()), tokenizer=tokenizer, model=model)
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True)
    output = model.generate(**inputs, max_new_tokens=14, do_sample=False, logits_processor=processor)

    for prompt, result in zip(prompts, processor.results(output), strict=True):
        print(f"{result.status:9} {prompt!r} {result.text!r}")


if __name__ == "__main__":
    main()
