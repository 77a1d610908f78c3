"""Runs inside an engine host: remembers which PUSH_REG notifications NIXL has accepted."""

from typing import Any

from vllm.distributed.nixl_utils import NixlWrapper

PUSH_REG = b"PUSH_REG:"


class NotificationWatch:
    """Wraps NIXL's `send_notif` for the whole process; thread-safe because it only appends."""

    def __init__(self) -> None:
        self._sent: list[bytes] = []
        send = NixlWrapper.send_notif

        def send_and_remember(agent: Any, remote_agent_name: str, notif_msg: bytes, *args: Any, **kwargs: Any) -> Any:
            result = send(agent, remote_agent_name, notif_msg, *args, **kwargs)
            self._sent.append(notif_msg)
            return result

        NixlWrapper.send_notif = send_and_remember

    def registered(self, base_request_id: str) -> bool:
        """Has a registration of this request left the process?"""
        needle = base_request_id.encode()
        return any(needle in message for message in list(self._sent) if message.startswith(PUSH_REG))
