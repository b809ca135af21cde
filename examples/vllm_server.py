"""Ask a vLLM server for guided answers with the OpenAI client.

vllm serve MODEL --logits-processors gd_plugin.vllm:GuidedLogitsProcessor
python examples/vllm_server.py [--url http://127.0.0.1:8000/v1]
"""

import argparse
import json

import openai

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="where the server listens")
    arguments = parser.parse_args()
    client = openai.OpenAI(base_url=arguments.url, api_key="none")
    model = client.models.list().data[0].id

    # HTTP carries flat values: a JSON Schema goes as text
    guides = {
        "Name a city and its population, as JSON.": {"guide_json_schema": json.dumps(SCHEMA)},
        "Is water wet? Answer yes or no.": {"guide_choice": ["yes", "no"]},
        "When did the year 2000 begin? Answer as YYYY-MM-DD.": {"guide_regex": r"[0-9]{4}-[0-9]{2}-[0-9]{2}"},
        "What is rain? Answer in a sentence.": {},
    }
    for prompt, guide in guides.items():
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=100,
            temperature=0.0,
            extra_body={"vllm_xargs": guide},
        )
        print(f"{prompt}\n    {answer.choices[0].message.content!r}")

    try:
        client.completions.create(model=model, prompt="x", extra_body={"vllm_xargs": {"guide_regex": "("}})
    except openai.BadRequestError as error:
        print(f"A guide that is wrong is refused, and nobody else notices:\n    {error.message}")


if __name__ == "__main__":
    main()
