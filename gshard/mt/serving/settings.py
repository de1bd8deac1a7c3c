"""The settings of a server, as the options of `gshard serve` give them."""

from __future__ import annotations

import ipaddress
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gshard.mt.errors import UserError
from gshard.mt.serving.keys import MOST, Key

LOCAL = "127.0.0.1"
Logs = Literal["none", "text", "json"]
LOGS: tuple[Logs, ...] = ("none", "text", "json")
_ORIGIN = re.compile(r"\*|https?://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


@dataclass(frozen=True)
class Settings:
    """Where a server listens, who may use it, and how much each may ask for.

    Without keys, the random token of the page's address is the only key; `is_open` needs none.
    `proxies` are the addresses whose X-Forwarded headers are believed; behind one, and on any other
    address than this machine's, the name in a request's Host header is not checked.
    """

    host: str = LOCAL
    port: int = 8000
    tls_cert: Path | None = None
    tls_key: Path | None = None
    keys: tuple[Key, ...] = ()
    is_open: bool = False
    per_minute: int = 0  # texts of everyone without a key, together; 0 is no limit
    characters: int = 5_000  # of a request
    texts: int = 100  # of a request
    proxies: str = ""
    cors: str = ""  # the origin whose pages may use it, or *
    logs: Logs = "none"

    def __post_init__(self) -> None:
        if not (1 <= self.characters <= MOST >= self.texts >= 1 and 0 <= self.per_minute <= MOST):
            raise UserError(
                f"--char-limit and --batch-limit are at least 1, --req-limit at least 0, and each "
                f"at most {MOST:,}"
            )
        for each in self.proxies.split(",") if self.proxies not in ("", "*") else ():
            try:
                ipaddress.ip_network(each.strip())
            except ValueError as error:
                raise UserError(
                    f"--proxies {self.proxies!r}: {error}; allowed are * and addresses or networks "
                    "with commas between them, such as 127.0.0.1,10.0.0.0/8"
                ) from None
        if self.cors and not _ORIGIN.fullmatch(self.cors):
            raise UserError(
                f"--cors {self.cors!r} is no origin as browsers send it; allowed are * and an "
                "origin without a path, such as https://example.org"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UserError("--tls-cert and --tls-key belong together; give both or neither")
        if self.tls_cert is not None and self.tls_key is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            try:
                # Without a password, OpenSSL would ask the terminal for one.
                context.load_cert_chain(self.tls_cert, self.tls_key, password="")
            except OSError as error:  # of which ssl.SSLError is one
                raise UserError(
                    f"{self.tls_cert} and {self.tls_key} are not a certificate and a key in PEM: "
                    f"{error}"
                ) from None

    @property
    def checks_names(self) -> bool:
        """Whether a request must call the server by this machine's own name."""
        return is_local(self.host) and not self.proxies

    @property
    def scheme(self) -> str:
        """Of its addresses."""
        return "https" if self.tls_cert else "http"


def is_local(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
