"""A guide for each request of transformers' continuous batching."""

from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

import gd_plugin as gd
from gd_plugin.testing.real_model import smollm2_folder


def main() -> None:
    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    guides = {
        "Is water wet? yes or no:": gd.Guide.choice([" yes", " no"]),
        "The capital of France is": None,
        "The first moon landing, as a year:": gd.Guide.regex(" (19|20)[0-9]{2}"),
    }
    prompts = [tokenizer(text).input_ids for text in guides]
    # a small cache; the default fills the device
    cache = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=64, use_async_batching=False)
    settings = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=2, pad_token_id=2)
    with gd.hf.enable_continuous_batching(model, tokenizer=tokenizer):
        results = model.generate_batch(
            prompts, guide=list(guides.values()), generation_config=settings, continuous_batching_config=cache
        )
    for text, result in zip(guides, results.values(), strict=True):
        print(f"{text!r} {tokenizer.decode(result.generated_tokens, skip_special_tokens=True)!r}")


if __name__ == "__main__":
    main()
