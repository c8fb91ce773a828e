"""Draws Chrome traces as one SVG: a panel for each run, a row for each thread, all on one scale.

    lockstep bench timeline --output out/timeline
    python3 tools/timeline.py --output timeline.svg "Split=out/timeline/split.json" \\
        "Two ranks=out/timeline/rank-0.json,out/timeline/rank-1.json"

Each row says how much of the panel's time it was busy; spans whose name begins with "waits" are
drawn and do not count. Reads what lockstep/monitor/chrome_trace.h writes.
"""

import argparse
import html
import json
import sys

COLOURS = {"forward": "#7fb3d5", "backward": "#2e6da4", "optimizer": "#e0a458"}
WAITING = "#d9534f"
OTHERS = ["#8e7cc3", "#6aa84f", "#a2665c", "#45818e"]
WIDTH, LEFT, ROW, GAP = 860, 210, 26, 8
INK = "#1f2933"


def read_lanes(paths):
    """[(name, [(span's name, begin, end)])] of the threads of some files, times in ms."""
    lanes = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            events = json.load(file)
        names = {e["tid"]: e["args"]["name"] for e in events
                 if e["ph"] == "M" and e["name"] == "thread_name"}
        for thread in sorted({e["tid"] for e in events if e["ph"] == "X"}):
            spans = [(e["name"], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3) for e in events
                     if e["ph"] == "X" and e["tid"] == thread]
            lanes.append((names.get(thread, f"{path} {thread}"), sorted(spans, key=lambda s: s[1])))
    if not lanes:
        raise ValueError(f"there are no spans in {', '.join(paths)}")
    return lanes


def window(lanes):
    return (min(begin for _, spans in lanes for _, begin, _ in spans),
            max(end for _, spans in lanes for _, _, end in spans))


def busy(spans):
    return sum(end - begin for name, begin, end in spans if not name.startswith("waits"))


def overlap(a, b):
    """Milliseconds in which both rows are busy."""
    return sum(max(0.0, min(x[2], y[2]) - max(x[1], y[1]))
               for x in a for y in b
               if not x[0].startswith("waits") and not y[0].startswith("waits"))


def colour_of(name, legend):
    if name not in legend:
        if name.startswith("waits"):
            legend[name] = WAITING
        else:
            used = sum(colour in OTHERS for colour in legend.values())
            legend[name] = COLOURS.get(name, OTHERS[used % len(OTHERS)])
    return legend[name]


def text(x, y, words, size=12, anchor="start", weight="normal"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'font-weight="{weight}" fill="{INK}">{html.escape(words)}</text>')


def draw(panels):
    """`panels`: [(title, lanes)]."""
    longest = max(end - begin for begin, end in (window(lanes) for _, lanes in panels))
    scale = (WIDTH - LEFT - 70) / longest
    parts, legend, y = [], {}, 14
    for title, lanes in panels:
        begin, end = window(lanes)
        y += 14
        parts.append(text(10, y, title, 14, weight="bold"))
        y += 10
        for name, spans in lanes:
            parts.append(text(LEFT - 10, y + ROW * 0.65, name, anchor="end"))
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{(end - begin) * scale:.1f}" '
                         f'height="{ROW}" fill="#eef1f5"/>')
            for kind, first, last in spans:
                parts.append(f'<rect x="{LEFT + (first - begin) * scale:.2f}" y="{y}" '
                             f'width="{max(0.3, (last - first) * scale):.2f}" height="{ROW}" '
                             f'fill="{colour_of(kind, legend)}"><title>{html.escape(kind)} '
                             f'{last - first:.2f} ms</title></rect>')
            share = 100 * busy(spans) / (end - begin)
            parts.append(text(LEFT + (end - begin) * scale + 8, y + ROW * 0.65, f"{share:.0f} %"))
            y += ROW + GAP
        y += 12
    y += 6
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10 ** 9)
                if longest / s <= 10)
    for i in range(int(longest / step) + 1):
        x = LEFT + i * step * scale
        parts.append(f'<line x1="{x:.1f}" y1="{y - 12}" x2="{x:.1f}" y2="{y - 6}" stroke="{INK}"/>')
        parts.append(text(x, y + 6, f"{i * step} ms" if i else "0", 11, "middle"))
    y += 28
    x = LEFT
    for name, colour in legend.items():
        parts.append(f'<rect x="{x}" y="{y - 11}" width="14" height="14" fill="{colour}"/>')
        parts.append(text(x + 20, y, name))
        x += 40 + 7 * len(name)
    height = y + 14
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'font-family="Helvetica,Arial,sans-serif">\n'
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n' + "\n".join(parts) +
            "\n</svg>\n")


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True, help="the SVG file")
    parser.add_argument("panels", nargs="+", metavar="TITLE=FILE[,FILE...]")
    options = parser.parse_args(arguments)
    panels = []
    for panel in options.panels:
        title, equals, files = panel.rpartition("=")
        if not equals or not files:
            parser.error(f"'{panel}' is not TITLE=FILE[,FILE...]")
        try:
            panels.append((title, read_lanes(files.split(","))))
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"'{panel}' cannot be drawn: {error}")
    for title, lanes in panels:
        begin, end = window(lanes)
        print(f"{title}: {end - begin:.1f} ms")
        for name, spans in lanes:
            print(f"  {name}: busy {100 * busy(spans) / (end - begin):.0f} % of the time")
        if len(lanes) == 2:
            both = overlap(lanes[0][1], lanes[1][1])
            print(f"  both at once {100 * both / (end - begin):.0f} % of the time")
    with open(options.output, "w", encoding="utf-8") as file:
        file.write(draw(panels))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
