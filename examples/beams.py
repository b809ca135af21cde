"""Beam search, each beam within the guide."""

from transformers import AutoModelForCausalLM, AutoTokenizer

import gd_plugin as gd
from gd_plugin.testing.real_model import smollm2_folder


def main() -> None:
    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    guide = gd.Guide.choice(["red", "orange", "yellow", "green", "blue", "a shade of grey"])
    processor = gd.GuidedLogitsProcessor(guide, tokenizer=tokenizer, model=model)
    inputs = tokenizer("The colour of the sky is", return_tensors="pt")
    output = model.generate(
        **inputs, max_new_tokens=8, do_sample=False, num_beams=4, num_return_sequences=4, logits_processor=processor
    )
    # rows change places between steps; a row's state is found from its tokens, so nothing needs to be told
    for result in processor.results(output):
        print(result.status, repr(result.text))


if __name__ == "__main__":
    main()
