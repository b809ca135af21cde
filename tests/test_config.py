"""GuidedDecodingConfig: defaults, checks, the environment."""

import dataclasses
import pickle
from typing import Any

import pytest

from gd_plugin import GuidedDecodingConfig

BAD: list[tuple[dict[str, Any], str]] = [
    ({"whitespace": "none"}, "'bounded' or 'compact' or 'any'"),
    ({"on_dead_end": 1}, "on_dead_end"),
    ({"max_whitespace": -1}, "negative"),
    ({"max_whitespace": "3"}, "int"),
    ({"max_depth": True}, "max_depth"),
    ({"strict": 1}, "bool"),
    ({"cache_bytes": 1.5}, "int"),
    ({"compile_timeout_s": 0}, "positive"),
    ({"compile_timeout_s": float("nan")}, "positive"),
    ({"fill_threads": 0}, "at least 1"),
    ({"backend": None}, "backend"),
    ({"pin_memory": "yes"}, "pin_memory"),
]


@pytest.mark.parametrize(("fields", "words"), BAD)
def test_bad_values_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GuidedDecodingConfig(**fields)
    with pytest.raises(ValueError, match=words):
        GuidedDecodingConfig().replace_fields(**fields)


def test_unknown_options_name_the_near_one() -> None:
    with pytest.raises(TypeError, match="did you mean 'on_dead_end'"):
        GuidedDecodingConfig().replace_fields(on_deadend="stop")
    with pytest.raises(TypeError, match="the options are"):
        GuidedDecodingConfig().replace_fields(zzz=1)


def test_a_configuration_is_a_value() -> None:
    config = GuidedDecodingConfig(max_depth=3)
    assert pickle.loads(pickle.dumps(config)) == config == GuidedDecodingConfig().replace_fields(max_depth=3)
    assert hash(config) == hash(GuidedDecodingConfig(max_depth=3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_depth = 4  # type: ignore[misc]


ENVIRONMENT: list[tuple[str, str, Any]] = [
    ("BACKEND", "xgrammar", "xgrammar"),
    ("WHITESPACE", "compact", "compact"),
    ("MAX_WHITESPACE", "3", 3),
    ("STRICT", "off", False),
    ("STRICT", "1", True),
    ("PIN_MEMORY", "", None),
    ("PIN_MEMORY", "yes", True),
    ("FILL_THREADS", "none", None),
    ("FILL_THREADS", "2", 2),
    ("COMPILE_TIMEOUT_S", "0.5", 0.5),
]


@pytest.mark.parametrize(("name", "text", "value"), ENVIRONMENT)
def test_the_environment_is_read(name: str, text: str, value: Any) -> None:
    config = GuidedDecodingConfig.from_env({f"GD_PLUGIN_{name}": text, "GD_PLUGIN_UNRELATED": "x", "PATH": "/"})
    assert getattr(config, name.lower()) == value
    assert GuidedDecodingConfig.from_env({}) == GuidedDecodingConfig()


@pytest.mark.parametrize(
    ("name", "text"),
    [("STRICT", "maybe"), ("MAX_DEPTH", "x"), ("MAX_DEPTH", "-1"), ("WHITESPACE", "no"), ("COMPILE_TIMEOUT_S", "0")],
)
def test_a_bad_variable_is_named(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=name if text not in ("-1", "0") else name.lower()):
        GuidedDecodingConfig.from_env({f"GD_PLUGIN_{name}": text})


def test_a_misspelled_variable_is_named() -> None:
    with pytest.raises(ValueError, match="GD_PLUGIN_BACKEN is no setting: did you mean GD_PLUGIN_BACKEND"):
        GuidedDecodingConfig.from_env({"GD_PLUGIN_BACKEN": "xgrammar"})
    others = {"GD_PLUGIN_CACHE": "/x", "GD_PLUGIN_FUZZ": "long", "GD_PLUGIN_CONFORMANCE_DATA": "/y"}
    assert GuidedDecodingConfig.from_env(others) == GuidedDecodingConfig()
