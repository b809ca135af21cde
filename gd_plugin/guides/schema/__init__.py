"""JSON Schema: a normal form that engines can enforce exactly, and grammars made from it.

In:         a schema as a JSON value        Out: `Normal`, then grammar text for an engine
May import: the standard library, gd_plugin.errors, gd_plugin.config, gd_plugin.guides
Read:       graph (the whole), reading and the keyword modules beside it, branches (merging), languages, emit, members
"""

from gd_plugin.guides.schema.routing import normal_form, schema_problems, schema_to_lark

__all__ = ["normal_form", "schema_problems", "schema_to_lark"]
