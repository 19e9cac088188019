"""The configuration that says everything: each setting at its default, with its sentence."""

from __future__ import annotations

from iskander.config import render_value, settings


def render_reference() -> str:
    """A commented TOML file with every setting at its default."""
    lines = [
        "# Every setting of iskander-gateway at its default.",
        "# Made by: iskander config reference",
    ]
    section = ""
    for setting in settings():
        name, key = setting.path.split(".")
        if name != section:
            section = name
            heading = "[[models]]" if name == "models" else f"[{name}]"
            lines += ["", ("# " if name == "models" else "") + heading]
        lines.append(f"# {setting.sentence} ({setting.type})")
        is_absent = name == "models" or setting.default is None
        lines.append(("# " if is_absent else "") + f"{key} = {render_value(setting.default)}")
    return "\n".join(lines) + "\n"
