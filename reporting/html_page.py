# SPDX-License-Identifier: Apache-2.0
"""The shell of an HTML page that needs no other file, network or script, in light and dark colors."""

import html

CSS = """
:root { color-scheme: light dark; --ink: #23272e; --soft: #646b75; --rule: #d0d4da; --paper: #fff; --panel: #f6f7f9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e6ea; --soft: #9aa2ad; --rule: #424852; --paper: #16191e;
  --panel: #1e2228; } }
body { margin: 0 auto; max-width: 1100px; padding: 24px 16px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 25px; line-height: 1.3; font-weight: 600; margin: 0 0 16px; }
h2 { font-size: 18px; font-weight: 600; margin: 40px 0 8px; }
p { color: var(--soft); margin: 4px 0; max-width: 85ch; }
figure { margin: 0; padding: 10px; background: var(--panel); border-radius: 6px; }
svg { display: block; height: auto; }
@media print { :root { color-scheme: light; --ink: #000; --soft: #333; --rule: #bbb; --paper: #fff; --panel: #fff; }
  body { max-width: none; padding: 0; font-size: 10pt; } h2 { break-after: avoid; } }
"""


def document(title: str, body: str, css: str) -> str:
    """Return an HTML document; the same arguments give the same bytes.

    The caller escapes the text in `body`. `css` has rules of this page, in addition to CSS.
    """
    title = html.escape(title)
    head = '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    head += f"<title>{title}</title>\n<style>{CSS}{css}</style>"
    body = f"<h1>{title}</h1>\n{body}"
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'
