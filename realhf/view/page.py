"""The files of the page, and the page as one file that opens without a server."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Mapping
from html import escape
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

_IMPORT = re.compile(r'^import (?:\* as (\w+)|\{ ([^}]*) \}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) ([\w$]+))", re.MULTILINE)
_LINK = re.compile(r'<link rel="stylesheet" href="/static/([\w.]+)">\n')
_SCRIPT = re.compile(r'<script( type="module")? src="/static/([\w.]+)"></script>\n')


def static_files() -> dict[str, Traversable]:
    """Return the files of the page, and those that it shares with other pages, by their names in order."""
    folders = resources.files("realhf.view").joinpath("static"), resources.files("realhf.base").joinpath("look")
    found = {file.name: file for folder in folders for file in folder.iterdir() if file.is_file()}
    return dict(sorted(found.items()))


def one_file(title: str, answers: Mapping[str, Any]) -> str:
    """Return the page with everything in it that it loads otherwise, and ``answers`` {path: what the server would
    answer} in place of a server. The policy in its head lets only these scripts and styles run, and no request
    leave."""
    texts = {name: file.read_text("utf-8") for name, file in static_files().items()}
    page = texts["index.html"]
    styles = [texts[name] for name in _LINK.findall(page)]
    scripts = [_one_script(texts, name) if module else texts[name] for module, name in _SCRIPT.findall(page)]
    policy = (
        f"default-src 'none'; script-src {_digests(scripts)}; style-src {_digests(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    head += "".join(f"<style>{style}</style>\n" for style in styles)
    packed = base64.b64encode(gzip.compress(json.dumps(answers).encode(), mtime=0)).decode()
    body = "<noscript>This report is drawn by JavaScript, which is off here.</noscript>\n"
    body += f'<script type="application/octet-stream" id="answers">{packed}</script>\n'
    body += "".join(f"<script>{script}</script>\n" for script in scripts)
    icon = f"data:image/svg+xml;base64,{base64.b64encode(texts['icon.svg'].encode()).decode()}"
    page = _SCRIPT.sub("", _LINK.sub("", page)).replace("/static/icon.svg", icon)
    page = page.replace("<title>", f"{head}<title>", 1).replace("</body>", f"{body}</body>")
    return page.replace("<title>realhf view</title>", f"<title>{escape(title)}</title>")


def _digests(texts: list[str]) -> str:
    found = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in found)


def _one_script(texts: Mapping[str, str], name: str) -> str:
    """Join a module and all that it imports to one plain script: each becomes a function that returns what the module
    exports, after those that it imports. Modules from a file would have to be loaded from others."""
    joined: dict[str, str] = {}

    def add(module: str) -> None:
        text = texts[f"{module}.js"]
        for _, _, wanted in _IMPORT.findall(text):
            if wanted not in joined:
                add(wanted)
        exports = ", ".join(_EXPORT.findall(text))
        body = _EXPORT.sub("", _IMPORT.sub(_taken, text))
        joined[module] = f"const of_{module} = (() => {{\n{body}\nreturn {{ {exports} }};\n}})();\n"

    add(name.removesuffix(".js"))
    return '"use strict";\n(() => {\n' + "".join(joined.values()) + "})();\n"


def _taken(found: re.Match[str]) -> str:
    whole, names, module = found.groups()
    return f"const {whole or '{ ' + names.replace(' as ', ': ') + ' }'} = of_{module};"
