"""For `make sbom`: dist/sbom.json, the bill of materials of nanospec without extras, in CycloneDX's format.

    python -m bench.sbom dist/sbom.json

cyclonedx-py describes all of the environment that this runs in, and counts packages of extras as needed if
they are there. Kept is what nanospec's own requirements lead to, in the versions that are installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement


def named(package: str) -> str:
    """The name of Jinja2 or Jinja2==3.1.6 as indexes spell it."""
    return re.sub(r"[-_.]+", "-", package.split("==")[0]).lower()


def needed(package: str) -> dict[str, set[str]]:
    """What an installed package needs without extras, and what that needs, and so on; by name."""
    needs: dict[str, set[str]] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(package, "")]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for asked in map(Requirement, requires(name) or ()):
            if asked.marker is None or asked.marker.evaluate({"extra": extra}):
                needs.setdefault(named(name), set()).add(named(asked.name))
                waiting += [(asked.name, wanted) for wanted in ("", *asked.extras)]
    return needs


def core(document: dict[str, Any], needs: dict[str, set[str]]) -> dict[str, Any]:
    """The document of its root and what that needs, and of no other package."""
    root = document["metadata"]["component"]
    name = {part["bom-ref"]: named(part["name"]) for part in (root, *document["components"])}
    kept = {named(root["name"])}.union(*needs.values())
    dependencies = []
    for entry in document["dependencies"]:
        mine = needs.get(name[entry["ref"]], ())
        if name[entry["ref"]] in kept:
            below = [ref for ref in entry.get("dependsOn", ()) if name[ref] in mine]
            dependencies.append({"ref": entry["ref"], "dependsOn": below})
    components = [part for part in document["components"] if named(part["name"]) in kept]
    return {**document, "components": components, "dependencies": dependencies}


def main(path: Path) -> None:
    """Command line."""
    tool = [str(Path(sys.executable).with_name("cyclonedx-py")), "environment", "--output-reproducible"]
    options = ["--pyproject", "pyproject.toml", "--mc-type", "library", sys.executable]
    document = json.loads(subprocess.check_output([*tool, *options]))
    document["metadata"]["component"]["version"] = version("nanospec")
    document = core(document, needed("nanospec"))
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {len(document['components'])} components")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
