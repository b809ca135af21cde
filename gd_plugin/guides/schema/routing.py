"""A schema guide's text and the configuration -> what a backend cannot enforce, and the grammar it is given.

Adapters call this; each schema is brought into normal form once, however many backends ask.
"""

import json
from dataclasses import replace

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import GuideError, UnsupportedGuideError
from gd_plugin.guides.caching import text_cache
from gd_plugin.guides.problem import Problem
from gd_plugin.guides.schema.emit import to_llguidance, unordered_problems
from gd_plugin.guides.schema.graph import build_graph
from gd_plugin.guides.schema.shapes import Normal
from gd_plugin.guides.schema.support import xgrammar_problems

__all__ = ["normal_form", "schema_problems", "schema_to_lark"]


def normal_form(text: str, config: GuidedDecodingConfig) -> Normal:
    """The normal form of a schema in JSON text; see `build_graph` for what it raises."""
    found = _normal_form(text, config.additional_properties, config.strict)
    if isinstance(found, GuideError):
        raise found.with_traceback(None)
    return found


@text_cache
def _normal_form(text: str, additional_properties: bool, strict: bool) -> Normal | GuideError:
    """The normal form, or why there is none: backends ask one after the other."""
    try:
        return build_graph(json.loads(text), additional_properties=additional_properties, strict=strict)
    except GuideError as error:
        return error


def schema_problems(text: str, config: GuidedDecodingConfig, backend: str) -> list[Problem]:
    """What `backend` cannot enforce: what has no normal form, or with `strict=False` what was dropped for that."""
    try:
        normal = normal_form(text, config)
    except UnsupportedGuideError as error:
        return [Problem(error.pointer or "#", error.keyword or "", backend, _reason(error))]
    except GuideError:
        # wrong for every backend: compile says so
        return []
    found = [Problem(problem.pointer, problem.keyword, backend, problem.message) for problem in normal.dropped]
    if backend == "xgrammar":
        found.extend(xgrammar_problems(text, config.additional_properties, config.property_order))
    elif config.property_order == "any":
        found.extend(replace(problem, backend=backend) for problem in unordered_problems(normal))
    return found


def _reason(error: UnsupportedGuideError) -> str:
    return error.message.removeprefix(f"{error.pointer}: ")


def schema_to_lark(text: str, config: GuidedDecodingConfig) -> str:
    """The grammar for llguidance; raises what `build_graph` and `to_llguidance` raise."""
    normal = normal_form(text, config)
    return to_llguidance(
        normal,
        whitespace=config.whitespace,
        max_whitespace=config.max_whitespace,
        property_order=config.property_order,
    )
