"""What mkdocs calls while it builds the site (`hooks` in mkdocs.yml). It imports the modules next to this one."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page as SitePage
from site_pages import files_of_example, generated_pages
from site_tree import (
    CODE,
    EXAMPLES,
    LINK,
    MOVED,
    NN_FILES,
    ROOT,
    Page,
    contract_modules,
    kinds_of,
    nn_page,
    place,
    resolve,
)

LOADED = re.compile(r"""<(?:script|img|iframe|link)[^>]*?\s(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")
"""What a browser fetches by itself for a page, from elsewhere."""
UNUSED = ("assets/javascripts/lunr", "assets/javascripts/**/*.map", "assets/stylesheets/*.map", "sitemap.xml*")
"""What the theme brings and these pages do not load: stemmers of other languages, and maps for debuggers."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds to the navigation what mkdocs.yml leaves out: pages of modules, which come and go with these."""
    assert config.nav is not None, "mkdocs.yml has a navigation"
    sections = {name: pages for each in config.nav for name, pages in each.items()}
    shared = [module for module in contract_modules() if not kinds_of(module) and module != "hooks"]
    sections["Contracts"].append({"Shared": [{module: f"contracts/{module}.md"} for module in shared]})
    modules = [module for module in NN_FILES.values() if module != "dovetail.nn"]
    sections["dovetail.nn"] += [{module.removeprefix("dovetail.nn."): nn_page(module)} for module in modules]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from outside of docs/, and those that are generated."""
    for origin, path in MOVED.items():
        text = (ROOT / origin).read_text(encoding="utf-8")
        if origin.startswith(f"{EXAMPLES}/dovetail-"):
            text += files_of_example(origin)
        files.append(File.generated(config, path, content=text))
    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: SitePage, config: MkDocsConfig, files: Files) -> str:
    """Links of the repository become links of the site."""
    here = page.file.src_uri
    origin = next((origin for origin, path in MOVED.items() if path == here), f"docs/{here}")
    if not (ROOT / origin).exists():
        return markdown
    parts = CODE.split(markdown)
    # Three parts each: text, a block of code, the block's fence.
    parts[::3] = [LINK.sub(lambda match: _link(origin, here, match), part) for part in parts[::3]]
    del parts[2::3]
    return "".join(parts)


def on_post_build(config: MkDocsConfig) -> None:
    """Deletes what is not needed, so that wheels stay small, and refuses pages that need a network."""
    site = Path(config.site_dir)
    for page in sorted(site.rglob("*.html")):
        if foreign := LOADED.search(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page.relative_to(site)} loads {foreign[1]}: the site must work offline")
    for pattern in UNUSED:
        for path in sorted(site.glob(pattern), reverse=True):
            if path.is_dir():
                for file in sorted(path.rglob("*"), reverse=True):
                    file.rmdir() if file.is_dir() else file.unlink()
                path.rmdir()
            else:
                path.unlink()


def _link(origin: str, here: str, match: Any) -> str:
    found = resolve(origin, match["target"])
    if found is None or not (ROOT / found[0]).exists():
        return str(match[0])
    path, fragment = found
    text = match["text"]
    # In the repository a page is named by its file; readers of the site see titles.
    if text.endswith(".md") and path.endswith(".md"):
        text = Page(path).title
    target = os.path.relpath(place(path), PurePosixPath(here).parent)
    return f"[{text}]({target}{fragment})"
