"""allowed_hosts: the hosts that an entry allows, and the tricks that it withstands."""

from __future__ import annotations

import contextlib
from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerpush.core.hosts import HostError, check_entry, host_allowed, is_host


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("prefill-0", ["prefill-0"]),
        ("Prefill-0.Cluster.LOCAL", ["prefill-0.cluster.local"]),
        ("prefill-0.", ["prefill-0"]),
        ("prefill-0", ["10.0.0.0/8", "Prefill-0."]),
        ("my_host", ["my_host"]),
        ("0x7f.example", ["0x7f.example"]),
        ("a.0x7f", ["a.0x7f"]),
        ("0xyz", ["0xyz"]),
        ("10.0.0.7", ["10.0.0.7"]),
        ("10.0.0.7", ["10.0.0.0/8"]),
        ("10.0.0.7", ["10.0.0.7/32"]),
        ("10.0.0.7", ["0.0.0.0/0"]),
        ("::ffff:10.0.0.7", ["10.0.0.0/8"]),
        ("[::ffff:a00:7]", ["10.0.0.7"]),
        ("10.0.0.7", ["::ffff:10.0.0.7"]),
        ("10.0.0.7", ["::ffff:10.0.0.0/104"]),
        ("fd00::7", ["fd00::/8"]),
        ("[fd00::7]", ["fd00::7"]),
        ("fd00:0:0:0::7", ["[fd00::7]"]),
        ("FD00::7", ["[fd00::]/8"]),
        ("fe80::1%eth0", ["fe80::/10"]),
    ],
)
def test_an_entry_allows_matching_hosts(host: str, allowed: list[str]) -> None:
    for entry in allowed:
        check_entry(entry)
    assert is_host(host)
    assert host_allowed(host, allowed)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("prefill-0", []),
        ("prefill-0", ["prefill-1", "10.0.0.0/8"]),
        ("prefill-0.evil.example", ["prefill-0"]),
        ("localhost", ["127.0.0.0/8", "::1"]),  # names are not resolved
        ("localhost", ["0.0.0.0/0", "::/0"]),
        ("10.0.0.7", ["10.0.0.70", "10.0.0.8/29"]),
        ("11.0.0.7", ["10.0.0.0/8"]),
        ("::ffff:11.0.0.7", ["10.0.0.0/8"]),
        ("::ffff:11.0.0.7", ["::/0"]),  # it is an IPv4 address
        ("::10.0.0.7", ["10.0.0.0/8"]),
        ("0xa000007", ["10.0.0.0/8"]),  # the resolver would read them as addresses; here they are refused
        ("10.7", ["10.0.0.0/8"]),
        ("167772167", ["10.0.0.0/8"]),
        ("fd00::7", ["fe80::/10", "10.0.0.0/8"]),
        ("fd00::7", ["prefill-0"]),
    ],
)
def test_a_host_without_a_matching_entry_is_not_allowed(host: str, allowed: list[str]) -> None:
    assert not host_allowed(host, allowed)


def test_without_a_list_every_host_is_allowed() -> None:
    assert host_allowed("anything", None)


@pytest.mark.parametrize(
    "host",
    [
        "",
        " ",
        "a b",
        "a\n",
        "a\0",
        "a/b",
        "a:80",
        "a;b",  # ZMQ connects from the address before a semicolon, to the one after it
        "127.0.0.1:0;evil.example",
        "::1%;evil.example",
        "fe80::1%eth0:1;[::2",
        "[::1",
        "::1]",
        "[10.0.0.7]",
        "[prefill-0]",
        "[[::1]]",
        "-a",
        "a-",
        "a..b",
        ".a",
        "*",
        "*.a",
        "10.0.0.256",
        "10.7",
        "167772167",
        "0x7f.1",
        "0X7F.1.",
        "0x7f000001",
        "127.0x1",
        "0x",
        "017700000001",
        "10.0.0.0/8",
        "prefıll",  # no ASCII letter; lower() or IGNORECASE may turn such a letter into one
        "\u212aube",
        "a" * 64,
        ".".join(["a" * 60] * 5),
    ],
)
def test_invalid_hosts_are_rejected(host: str) -> None:
    assert not is_host(host)


@given(st.text())
def test_any_text_can_be_checked_as_a_host(text: str) -> None:
    host_allowed(text, ["10.0.0.0/8", "prefill-0"])
    if is_host(text):
        assert text.isascii()
        assert not set(text) & set(" /;@#?\\\n\r\0")


@given(st.text())
def test_any_text_is_a_valid_entry_or_raises_a_host_error(text: str) -> None:
    with contextlib.suppress(HostError):
        check_entry(text)
        assert is_host(text) or "/" in text


@given(st.ip_addresses(v=4), st.ip_addresses(v=4))
def test_an_address_allows_itself_only(one: IPv4Address, other: IPv4Address) -> None:
    assert host_allowed(str(one), [str(one)])
    assert host_allowed(f"::ffff:{one}", [str(one)])
    assert host_allowed(str(one), [str(other)]) == (one == other)
