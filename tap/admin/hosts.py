"""Hosts under which the admin pages may be asked for: a browser that a stranger's name led here is refused.

A page of a stranger can point its own name at this address (DNS rebinding) and then read what it finds. It cannot own
an address, nor a name that public DNS does not have.
"""

from collections.abc import Collection
from ipaddress import ip_address

from fastapi import Request

PRIVATE_DOMAINS = ("localhost", "svc", "cluster.local", "internal")


def refusal(request: Request, names: Collection[str]) -> str | None:
    """Return the reason against a request, by its Host and Origin; null: none. ``names``: hosts that are ours."""
    host = request.headers.get("host", "")
    if host and not _is_ours(_name(host), names):
        return "Host: unknown name; expected an IP address, localhost, or a name given by --admin-name"
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return "Origin: another site; expected requests of these pages themselves"
    return None


def _name(host: str) -> str:
    """Return a Host header's name or address, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")


def _is_ours(name: str, names: Collection[str]) -> bool:
    try:
        return bool(ip_address(name))
    except ValueError:
        pass
    domains = tuple(f".{domain}" for domain in PRIVATE_DOMAINS)
    return "." not in name or name in names or name.endswith(domains)
