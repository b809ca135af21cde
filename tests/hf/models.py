"""Tiny random models over the real SmolLM2 vocabulary, and the ways `generate` is asked to use them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)

__all__ = ["EOS", "FORCED_BOS", "MODES", "PAD", "PROMPTS", "Kit", "Mode", "foreign_tokenizer", "tiny_llama"]

EOS = 2
PAD = 0
FORCED_BOS = 1
# of different lengths, and one holds the beginning of an answer
PROMPTS = ("Answer:", 'Give me {"n": 1} again: {"n": 1')
# spread of the random weights: wide enough that logits are not all alike
_SPREAD = 0.3


def tiny_llama(vocab_size: int = 49152, *, seed: int = 0, layers: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    """A random Llama with few weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=PAD,
        initializer_range=_SPREAD,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def _tiny_t5() -> Any:
    torch.manual_seed(1)
    config = T5Config(
        vocab_size=49152,
        d_model=32,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=PAD,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return T5ForConditionalGeneration(config).eval()


def _tiny_bart() -> Any:
    torch.manual_seed(2)
    config = BartConfig(
        vocab_size=49152,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=PAD,
        decoder_start_token_id=EOS,
        forced_eos_token_id=None,
        init_std=_SPREAD,
    )
    model = BartForConditionalGeneration(config).eval()
    # BART's way: the first generated token is forced to be a special one
    model.generation_config.forced_bos_token_id = FORCED_BOS
    return model


def foreign_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a vocabulary of its own: 256 bytes and three special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<pad>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


class Kit:
    """Models and prompts, each built when it is first asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def model(self) -> Any:
        return tiny_llama()

    @cached_property
    def draft(self) -> Any:
        return tiny_llama(seed=5, layers=1)

    @cached_property
    def bf16(self) -> Any:
        return tiny_llama(dtype=torch.bfloat16)

    @cached_property
    def fp16(self) -> Any:
        return tiny_llama(dtype=torch.float16)

    @cached_property
    def wide(self) -> Any:
        """More columns than the tokenizer has tokens, and not a multiple of 32."""
        return tiny_llama(49170)

    @cached_property
    def narrow(self) -> Any:
        return tiny_llama(40001)

    @cached_property
    def compiled(self) -> Any:
        model = tiny_llama()
        model.forward = torch.compile(model.forward, backend="eager", dynamic=True)
        return model

    @cached_property
    def several_stops(self) -> Any:
        model = tiny_llama()
        model.generation_config.eos_token_id = [EOS, 0, 5]
        return model

    @cached_property
    def t5(self) -> Any:
        return _tiny_t5()

    @cached_property
    def bart(self) -> Any:
        return _tiny_bart()

    @cached_property
    def foreign(self) -> tuple[PreTrainedTokenizerFast, Any]:
        return self.new_foreign()

    def new_foreign(self) -> tuple[PreTrainedTokenizerFast, Any]:
        """Sampling prunes the assistant's head for good, and the translator of a pair of tokenizers remembers it."""
        tokenizer = foreign_tokenizer()
        model = tiny_llama(len(tokenizer), seed=7)
        model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
        return tokenizer, model

    def prompts(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Token ids and attention mask, padded on the left."""
        rows = [self.tokenizer(text)["input_ids"] for text in texts]
        width = max(map(len, rows))
        ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        return {"input_ids": ids, "attention_mask": mask}


class _StopAtDigit(StoppingCriteria):
    """Stops rows at arbitrary places, without a stop token."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 3 == 0


@dataclass(frozen=True)
class Mode:
    """One way to call generate.

    Attributes:
        options: keyword arguments of generate.
        model: attribute of the Kit.
        single: one prompt only.
        extra: options that need the kit.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    model: str = "model"
    single: bool = False
    embeds: bool = False
    extra: Callable[[Kit], dict[str, Any]] = lambda kit: {}

    def __repr__(self) -> str:
        return self.name

    def prompt_len(self, kit: Kit) -> int:
        """Columns of the output that are not generated."""
        if self.embeds:
            return 0
        if self.model in ("t5", "bart"):
            return 1
        return int(self.inputs(kit)["input_ids"].shape[1])

    def inputs(self, kit: Kit) -> dict[str, torch.Tensor]:
        """Ids and attention mask of one or two prompts."""
        return kit.prompts(PROMPTS[:1] if self.single else PROMPTS)

    def run(self, kit: Kit, logits_processor: Any, *, seed: int = 0, max_new_tokens: int = 16, **options: Any) -> Any:
        """Return what generate returns, as a dict-like output."""
        model = getattr(kit, self.model)
        inputs = self.inputs(kit)
        if self.embeds:
            inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
        torch.manual_seed(seed)
        options = {"pad_token_id": PAD if seed % 2 else EOS, **self.options, **self.extra(kit), **options}
        with torch.no_grad():
            return model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                logits_processor=logits_processor,
                return_dict_in_generate=True,
                **options,
            )


_SAMPLE = {"do_sample": True}
MODES = [
    Mode("greedy"),
    Mode("sample", _SAMPLE),
    Mode("sample_warped", {**_SAMPLE, "temperature": 0.7, "top_p": 0.9, "typical_p": 0.9, "renormalize_logits": True}),
    Mode("sample_min_p", {**_SAMPLE, "top_k": 0, "min_p": 0.1, "temperature": 3.0}),
    Mode("sample_returns_3", {**_SAMPLE, "num_return_sequences": 3}),
    Mode("beams", {"num_beams": 3}),
    Mode("beams_early", {"num_beams": 3, "early_stopping": True, "num_return_sequences": 3}),
    Mode("beams_never", {"num_beams": 4, "early_stopping": "never", "length_penalty": 1.5, "num_return_sequences": 2}),
    Mode("beam_sample", {**_SAMPLE, "num_beams": 4, "num_return_sequences": 2}),
    Mode("beam_sample_hot", {**_SAMPLE, "num_beams": 3, "temperature": 5.0, "top_k": 0}),
    Mode("assisted", single=True, extra=lambda kit: {"assistant_model": kit.draft}),
    Mode("assisted_sample", _SAMPLE, single=True, extra=lambda kit: {"assistant_model": kit.draft}),
    Mode("assisted_self", single=True, extra=lambda kit: {"assistant_model": kit.model}),
    Mode("early_exit", {"assistant_early_exit": 1}, single=True),
    Mode("prompt_lookup", {"prompt_lookup_num_tokens": 3}, single=True),
    Mode("prompt_lookup_sample", {**_SAMPLE, "prompt_lookup_num_tokens": 4}, single=True),
    Mode(
        "foreign_assistant",
        single=True,
        extra=lambda kit: {
            "assistant_model": kit.foreign[1],
            "assistant_tokenizer": kit.foreign[0],
            "tokenizer": kit.tokenizer,
        },
    ),
    Mode(
        "foreign_assistant_sample",
        _SAMPLE,
        single=True,
        extra=lambda kit: {
            **dict(zip(("assistant_tokenizer", "assistant_model"), kit.new_foreign(), strict=True)),
            "tokenizer": kit.tokenizer,
        },
    ),
    Mode("embeds", embeds=True),
    Mode("embeds_beams", {"num_beams": 3}, embeds=True),
    Mode("guidance_scale", {"guidance_scale": 1.5}),
    Mode("static_cache", {"cache_implementation": "static"}),
    Mode("compiled", model="compiled"),
    Mode("stopping_criteria", extra=lambda kit: {"stopping_criteria": StoppingCriteriaList([_StopAtDigit()])}),
    Mode("several_stops", _SAMPLE, model="several_stops"),
    Mode("several_stops_beams", {"num_beams": 3}, model="several_stops"),
    Mode("bf16", _SAMPLE, model="bf16"),
    Mode("fp16", _SAMPLE, model="fp16"),
    Mode("wide", _SAMPLE, model="wide"),
    Mode("narrow", _SAMPLE, model="narrow"),
    Mode("t5", model="t5"),
    Mode("t5_beams", {"num_beams": 3, "num_return_sequences": 2}, model="t5"),
    Mode("t5_sample", _SAMPLE, model="t5"),
    Mode("bart", model="bart"),
    Mode("bart_beams", {"num_beams": 3}, model="bart"),
    Mode("bart_sample", {**_SAMPLE, "num_return_sequences": 2}, model="bart"),
]
