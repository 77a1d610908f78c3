"""``LayerwisePushConnector`` under the names of vLLM's NIXL connectors, for programs that look connectors up by name.

They start vLLM with ``"kv_connector": "NixlConnector", "kv_connector_module_path": "layerpush.nixl"``. vLLM prefers the
class of a module path to its own of that name.
"""

from layerpush.connector import LayerwisePushConnector

NixlConnector = NixlPushConnector = LayerwisePushConnector

__all__ = ["NixlConnector", "NixlPushConnector"]
