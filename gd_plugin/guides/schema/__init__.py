"""JSON Schema: a normal form that engines can enforce exactly, and grammars made from it.

In:         a schema as a JSON value        Out: `Normal`, then grammar text for an engine
May import: the standard library, gd_plugin.errors, gd_plugin.guides.report
Read:       graph (the whole), reading and the keyword modules beside it, branches (merging), languages, emit, members
"""

from gd_plugin.guides.schema.emit import to_llguidance
from gd_plugin.guides.schema.graph import build_graph as normalise
from gd_plugin.guides.schema.routing import normal_form, schema_problems, schema_to_lark
from gd_plugin.guides.schema.shapes import Normal as NormalSchema

__all__ = [
    "NormalSchema",
    "normal_form",
    "normalise",
    "schema_problems",
    "schema_to_lark",
    "to_llguidance",
]
