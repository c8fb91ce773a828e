"""docs/options.md is what tools/options_page.py makes of the headers.

    python3 tests/style/options_test.py              the project
    python3 tests/style/options_test.py --self-test  a page that is behind its header is reported
"""

import os
import pathlib
import sys

import tree
from tree import Violation

SOURCE = pathlib.Path(os.environ.get("LOCKSTEP_SOURCE") or pathlib.Path(__file__).parents[2])
sys.path.insert(0, str(SOURCE / "tools"))
import options_page  # noqa: E402  pylint: disable=wrong-import-position


def check(root):
    wanted = options_page.page(root).split("\n")
    found = tree.read(root, options_page.PAGE).split("\n")
    for line, text in enumerate(wanted, 1):
        if line > len(found) or found[line - 1] != text:
            return [Violation(options_page.PAGE, line, "behind", f"the headers say {text!r}. Run "
                              "python3 tools/options_page.py")]
    longer = len(found) > len(wanted)
    return [Violation(options_page.PAGE, len(wanted), "behind", "ends here")] if longer else []


def self_test():
    header = ("struct StepOptions {\n  double lr = 1e-3, beta = 0.9;  // rates. More of them\n"
              "  // How many. Only once.\n  std::vector<std::pair<int, int>> counts{{1, 2}};\n"
              "  const World* world = nullptr;\n  std::function<int(int, int)> body{};\n"
              "  static constexpr int kOne = 1;\n  void each(int x) const { f(x); }\n"
              "  bool operator==(const StepOptions&) const = default;\n};\nstruct Other {\n"
              "  int x = 0;\n};\n")
    table = ("| `lr` | `double` | `1e-3` | rates |\n| `beta` | `double` | `0.9` | rates |\n"
             "| `counts` | `std::vector<std::pair<int, int>>` | `{1, 2}` | How many |\n"
             "| `world` | `const World*` | `nullptr` |  |\n"
             "| `body` | `std::function<int(int, int)>` |  |  |\n")
    page = (options_page.HEAD + "\n## StepOptions\n\n`lockstep/a.h`\n\n"
            "| field | type | default | meaning |\n|---|---|---|---|\n" + table)
    good = {"docs/api.md": "## Included\n| `lockstep/a.h` | `StepOptions` | steps |\n",
            "lockstep/a.h": header, "docs/configuration.md": "", "docs/options.md": page}
    return tree.expect_planted("options", check, {
        None: [good],
        "behind": [good | {"lockstep/a.h": header.replace("1e-3", "1e-4")},
                   good | {"lockstep/a.h": header.replace("  int x", "  int y = 1;\n  int x")
                           .replace("Other", "OtherOptions")},
                   good | {"docs/options.md": page + "more\n"}]})


def main():
    if "--self-test" in sys.argv:
        return self_test()
    return tree.report("options", check(SOURCE), options_page.PAGE)


if __name__ == "__main__":
    sys.exit(main())
