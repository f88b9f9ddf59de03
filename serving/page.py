# SPDX-License-Identifier: Apache-2.0
"""The page at /: one HTML document without any other file, whose policy lets only its own style and script act."""

import base64
import hashlib
import pathlib

from puzzles import pictures
from reporting import html_page

FOLDER = pathlib.Path(__file__).parent


def page() -> tuple[str, dict[str, str]]:
    """Return (HTML document, headers)."""
    body, style, script = ((FOLDER / f"page.{suffix}").read_text() for suffix in ("html", "css", "js"))
    style = pictures.CELL_COLOURS + style
    document = html_page.document("Torus", f"{body}<script>{script}</script>", style)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(html_page.CSS + style)}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return document, {
        "Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    }  # fmt: skip


def _hash(text: str) -> str:
    """Return the source of a policy that allows this inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
