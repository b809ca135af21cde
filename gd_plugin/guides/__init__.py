"""What may be generated: guides, their sources and their normal forms.

In:         what a user wrote        Out: a frozen, hashable Guide
May import: the standard library, pydantic (late), gd_plugin.errors and config; neither torch nor an engine
Read:       guide, sources
"""
