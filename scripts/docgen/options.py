"""The settings of the connector, and the options of a `layerpush` command as its `--help` has them."""

from __future__ import annotations

import inspect
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from bench.markdown import Row
from layerpush.apps.proxy.command import proxy as proxy_command
from layerpush.core.config import LayerPushConfig, choices, key_types
from scripts.docgen.tables import table


def settings() -> str:
    """The keys of `kv_connector_extra_config`."""
    kinds = key_types()
    rows = []
    for field in msgspec.structs.fields(LayerPushConfig):
        kind = kinds[field.name]
        default = msgspec.json.encode(field.default).decode()
        rows.append((f"`{field.name}`", choices(kind), f"`{default}`", get_args(kind)[1].description))
    return table(("key", "values", "default", "meaning"), rows)


def proxy() -> str:
    """The options of `layerpush proxy`."""
    hints = get_type_hints(proxy_command, include_extras=True)
    rows = [_row(each, hints[each.name]) for each in inspect.signature(proxy_command).parameters.values()]
    return table(("option", "default", "meaning"), rows)


def _row(parameter: inspect.Parameter, hint: Any) -> Row:
    kind, option = get_args(hint)
    name = next(iter(option.param_decls or ()), f"--{parameter.name.replace('_', '-')}")
    one_of = ", ".join(f"`{choice}`" for choice in _choices(kind))
    match parameter.default:
        case inspect.Parameter.empty:
            default = "required"
        case None | False:
            default = ""
        case value:
            default = f"`{value}`"
    return f"`{name}`", default, option.help + (f" One of {one_of}." if one_of else "")


def _choices(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next((found for part in get_args(kind) if (found := _choices(part))), ())
