"""Checks the entries of `allowed_hosts`, and whether they allow a host. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

MAX_HOST_CHARS = 255

_LABEL = r"(?!-)[a-z0-9_-]{1,63}(?<!-)"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?", re.IGNORECASE | re.ASCII)
_NUMBER = r"(0x[0-9a-f]*|[0-9]+)"
_NUMBERS = re.compile(rf"{_NUMBER}(\.{_NUMBER})*\.?", re.IGNORECASE | re.ASCII)
_IN_BRACKETS = re.compile(r"\[([^\[\]]*:[^\[\]]*)\](/[0-9]+)?")
_SCOPE = re.compile(r"[a-z0-9_.-]+", re.IGNORECASE | re.ASCII)


class HostError(ValueError):
    """An entry of `allowed_hosts` is neither a host name, an IP address nor a network. The message has the reason."""


def host_allowed(host: str, allowed_hosts: Iterable[str] | None) -> bool:
    """Whether an engine may connect to `host`: it equals a listed name or address, or lies in a listed network.

    Names are compared as names and never resolved. None allows any host.
    """
    if allowed_hosts is None:
        return True
    address = _address(host)
    if address is None:
        return _name(host) in {_name(entry) for entry in allowed_hosts}
    networks = (_network(entry) for entry in allowed_hosts)
    return any(network is not None and address in network for network in networks)


def check_entry(entry: str) -> None:
    """Raises `HostError` unless `entry` is a host name, an IP address or a network in CIDR notation."""
    if "/" in entry:
        _check_network(entry)
    elif _address(entry) is None:
        _check_name(entry)


def is_host(text: str) -> bool:
    """Whether `text` has the form of a host name or an IP address."""
    return len(text) <= MAX_HOST_CHARS and (_address(text) is not None or _is_name(text))


def _check_network(entry: str) -> None:
    try:
        ip_network(_bare(entry))
    except ValueError as error:
        try:
            meant = ip_network(_bare(entry), strict=False)
        except ValueError:
            raise HostError(f"{entry!r} is no network in CIDR notation ({error})") from None
        raise HostError(f"{entry!r} has host bits set; write {str(meant)!r}") from None


def _check_name(entry: str) -> None:
    if "*" in entry:
        raise HostError(f"{entry!r} has a wildcard; list each name, or a network such as '10.0.0.0/8'")
    if ":" in entry:
        raise HostError(f"{entry!r} is no IPv6 address, and a port does not belong here")
    if not is_host(entry):
        raise HostError(f"{entry!r} is no host name and no IP address")


def _is_name(text: str) -> bool:
    """Numbers with dots between are no name: they are a mistyped IPv4 address, or one that only a resolver reads.

    For a resolver, `0x7f.1` and `017700000001` are 127.0.0.1.
    """
    return _NAME.fullmatch(text) is not None and _NUMBERS.fullmatch(text) is None


def _name(text: str) -> str:
    return text.lower().removesuffix(".")


def _bare(text: str) -> str:
    """Remove the brackets that URLs put around IPv6: `[::1]`, `[fd00::]/8`."""
    found = _IN_BRACKETS.fullmatch(text)
    return text if found is None else found[1] + (found[2] or "")


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an address; None if `text` is not one.

    An IPv4-mapped IPv6 address becomes the IPv4 address that a connection reaches.
    `ipaddress` accepts any text as the scope of `fe80::1%eth0`; ZMQ would read a `;` or `:` in it as another address.
    """
    try:
        address = ip_address(_bare(text))
    except ValueError:
        return None
    if isinstance(address, IPv4Address):
        return address
    if address.scope_id is not None and _SCOPE.fullmatch(address.scope_id) is None:
        return None
    return address.ipv4_mapped or address


def _network(entry: str) -> IPv4Network | IPv6Network | None:
    try:
        network = ip_network(_bare(entry))
    except ValueError:
        return None
    first = network.network_address
    if isinstance(first, IPv6Address) and first.ipv4_mapped is not None and network.prefixlen >= 96:
        return IPv4Network((first.ipv4_mapped, network.prefixlen - 96))
    return network
