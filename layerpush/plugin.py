"""Entry point `vllm.general_plugins`: every vLLM process (front end, engine core, worker) calls `register`."""

from __future__ import annotations

from layerpush.compat import patches
from layerpush.core.config import CONNECTOR_NAME

CONNECTOR_MODULE = "layerpush.connector"
CONNECTOR_CLASS = "LayerwisePushConnector"

_registered = False


class ConnectorNameError(RuntimeError):
    """Another class already has our connector's name."""


def register() -> None:
    """Register `"kv_connector": "LayerwisePushConnector"` with vLLM, and patch vLLM's front end (`compat.patches`).

    Idempotent and lazy: the connector and NIXL are imported when vLLM creates a connector of that name, and the front
    end is patched when vLLM imports it.

    vLLM only logs an entry point that cannot be imported, and later says `Unsupported connector type`. An error in this
    function stops the vLLM process instead. So this module must not fail at import.

    Raises:
        ConnectorNameError: the name belongs to a class that is not layerpush's.
        layerpush.core.config.ConfigError: LAYERPUSH_WITHOUT_PATCHES names a patch that does not exist.
    """
    global _registered
    if _registered:
        return

    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_CLASS)
    except ValueError as taken:
        # Import the holder of the name only in this case: the message has to name it.
        holder = _holder()
        if holder != f"{CONNECTOR_MODULE}.{CONNECTOR_CLASS}":
            raise ConnectorNameError(
                f"layerpush cannot register its vLLM connector: the name {CONNECTOR_NAME!r} already belongs to "
                f"{holder}. Uninstall one of the two plugins, or name the ones to load in VLLM_PLUGINS."
            ) from taken
    patches.install(patches.Process.FRONT_END)
    _registered = True


def _holder() -> str:
    """The class that has the connector name now, as `module.Class`."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        cls = KVConnectorFactory.get_connector_class_by_name(CONNECTOR_NAME)
    except Exception as error:  # noqa: BLE001  # another project's import may fail in any way; the caller raises
        return f"a class that cannot be imported ({type(error).__name__}: {error})"
    return f"{cls.__module__}.{cls.__qualname__}"
