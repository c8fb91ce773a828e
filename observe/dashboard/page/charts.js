// Charts: lines over steps or seconds, and stacked shares of time. page.js, which is read after this
// file, has the functions for figures and elements, and calls drawCharts().
'use strict';

const SVG = 'http://www.w3.org/2000/svg';
// Of an evaluation itself, which nobody follows over steps.
const NOT_DRAWN = ['eval_runtime', 'eval_samples_per_second'];
const MOST_CHARTS = 12;
const COLOURS = 8;  // of lines in one chart, in page.css

function shape(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

// Round figures for the lines of a chart.
function ticks(low, high, most) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / most;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const result = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) {
    result.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  }
  return result;
}

// "2.500" reads better as "2.5"; "10" stays. Lines that are close together have all their digits.
function tickTexts(values) {
  const exact = values.map((value) => Number(value.toPrecision(6)));
  const texts = exact.map((value) => figure(value).replace(/(\.\d*?)0+(?= |e|$)/, '$1')
    .replace(/\.(?= |e|$)/, ''));
  if (new Set(texts).size === texts.length) return texts;
  return exact.map((value) => (value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential() : String(value)));
}

// The stretches between values that are not finite.
function stretches(series) {
  const result = [];
  let open = false;
  for (const point of list(series)) {
    const [known] = points([point]);
    if (known && open) result.at(-1).push(known);
    else if (known) result.push([known]);
    open = Boolean(known);
  }
  return result;
}

const BOX = { width: 360, height: 186, left: 46, right: 10, top: 20, bottom: 36 };

// Where a value is drawn between `from` and `to`, and which round values are named.
function axisOver(values, from, to, { log = false, zero = false, margin = 0 } = {}) {
  const f = log ? Math.log10 : (v) => v;
  let [low, high] = [f(Math.min(...values)), f(Math.max(...values))];
  if (zero && !log) [low, high] = [Math.min(0, low), Math.max(0, high)];
  const room = margin * (high - low || Math.abs(high) || 1);
  if (!log && low >= 0) low = Math.max(0, low - room);
  else low -= room;
  high += room;
  if (high <= low) high = low + (Math.abs(low) || 1);
  const place = (v) => from + ((f(v) - low) / (high - low)) * (to - from);
  // Of a logarithmic axis the powers of ten, with 2 and 5 where there are few of them.
  const round = (most) => {
    if (!log) return ticks(low, high, most);
    const digits = high - low < 2 ? [1, 2, 5] : [1];
    const all = [];
    for (let power = Math.floor(low); power <= high; power += 1) {
      all.push(...digits.map((digit) => digit * 10 ** power));
    }
    return all.filter((v) => f(v) >= low - 1e-9 && f(v) <= high + 1e-9);
  };
  return { place, round, low };
}

function label(className, x, y, anchor, text) {
  const element = shape('text', { class: className, x, y, 'text-anchor': anchor });
  element.textContent = text;
  return element;
}

// Grid lines with their values, the values below, and what both are.
function frame(chart, x, y, xTicks) {
  const { width, height, left, right, bottom } = BOX;
  const lines = y.round(4);
  const texts = chart.percent ? lines.map(percent) : tickTexts(lines);
  const parts = lines.flatMap((tick, i) => [
    shape('line', { class: 'grid', x1: left, x2: width - right, y1: y.place(tick), y2: y.place(tick) }),
    label('axis', left - 7, y.place(tick) + 4, 'end', texts[i]),
  ]);
  // Where two would overlap, the first one stays.
  let free = -Infinity;
  for (const [value, text] of xTicks) {
    const [px, half] = [x.place(value), 3.2 * text.length];
    if (px - half < free) continue;
    free = px + half + 4;
    parts.push(label('axis', Math.min(px, width - half), height - bottom + 15, 'middle', text));
  }
  parts.push(label('axis', (left + width - right) / 2, height - 4, 'middle', chart.x_label));
  if (chart.y_label) parts.push(label('axis', 0, 9, 'start', chart.y_label));
  return parts;
}

function lineParts(line, i, chart, x, y) {
  const name = `${line.reference === true ? 'reference' : `l${i % COLOURS}`}`;
  const place = ([a, b]) => `${x.place(a).toFixed(1)},${y.place(b).toFixed(1)}`;
  const pieces = stretches(line.points);
  const known = pieces.flat();
  const parts = [];
  if (chart.lines.length === 1 && !chart.log) {
    parts.push(shape('path', { class: `under ${name}`, d: pieces.map((some) =>
      `M${x.place(some[0][0])},${y.place(y.low)}L${some.map(place).join('L')}L${x.place(some.at(-1)[0])},${y.place(y.low)}Z`).join('') }));
  }
  parts.push(shape('path', { class: `curve ${name}`, d: pieces.map((some) => `M${some.map(place).join('L')}`).join('') }));
  // A value between two gaps would not be seen without a dot.
  const dots = line.reference === true ? [] : chart.dots === true ? known : [...pieces.filter((some) => some.length === 1).flat(), known.at(-1)];
  parts.push(...dots.map((p) => shape('circle', { class: `point ${name}`, cx: x.place(p[0]), cy: y.place(p[1]), r: 3.2 })));
  list(line.labels).forEach((text, k) => {
    const [a, b] = known[k] ?? [];
    if (a === undefined) return;
    const left = x.place(a) < BOX.width / 2;
    parts.push(label('axis', x.place(a) + (left ? 7 : -7), y.place(b) + (left ? 14 : -7), left ? 'start' : 'end', String(text)));
  });
  return parts;
}

// What happened at a step: a dotted line, named where there is room.
function markParts(marks, x, low, high) {
  const seen = list(marks).filter((m) => Array.isArray(m) && number(m[0]) !== null && m[0] >= low && m[0] <= high);
  return seen.flatMap(([value, text], i) => {
    const px = x.place(value);
    const line = shape('line', { class: 'mark', x1: px, x2: px, y1: BOX.top, y2: BOX.height - BOX.bottom });
    if (i > 0 && px - x.place(seen[i - 1][0]) < 50) return [line];
    return [line, label('axis', px, BOX.top - 6, 'middle', String(text))];
  });
}

function drawLines(svg, chart) {
  const { width, height, left, right, top, bottom } = BOX;
  const all = chart.lines.flatMap((line) => points(line.points));
  const [xs, ys] = [all.map((p) => p[0]), all.map((p) => p[1])];
  const log = chart.log === true;
  const zero = chart.from_zero === true;
  const x = axisOver(xs, left, width - right, { log, zero, margin: log ? 0.03 : 0 });
  const y = axisOver(ys, height - bottom, top, { log, zero, margin: zero ? 0.02 : 0.08 });
  const rounds = x.round(5).filter((v) => !chart.whole || Number.isInteger(v));
  const texts = chart.whole ? rounds.map((v) => v.toLocaleString('en')) : tickTexts(rounds);
  const given = list(chart.x_ticks).filter(Array.isArray).map(([v, text]) => [v, String(text)]);
  svg.replaceChildren(
    ...frame(chart, x, y, given.length ? given : rounds.map((v, i) => [v, texts[i]])),
    ...markParts(chart.marks, x, Math.min(...xs), Math.max(...xs)),
    ...chart.lines.map((line, i) => lineParts(line, i, chart, x, y)).reverse().flat(),
  );
  const said = chart.lines.map((line) => {
    const end = points(line.points).at(-1);
    return `${line.name ? `${line.name} ` : ''}${figure(end[1])} ${chart.unit ?? ''} at ${chart.x_label} ${figure(end[0])}`;
  });
  svg.setAttribute('aria-label', `${chart.title}: ${said.join('; ')}; between ${figure(Math.min(...ys))} and ${figure(Math.max(...ys))}`);
}

// Shares of time, stacked; the time between two starts stays open.
function drawColumns(svg, chart) {
  const { width, height, left, right, top, bottom } = BOX;
  const x = axisOver(chart.columns.flatMap((c) => [c[0], c[1]]), left, width - right);
  const y = axisOver([0, 1], height - bottom, top);
  const rounds = x.round(5);
  const texts = tickTexts(rounds);
  const paths = new Map();
  for (const [from, to, ...values] of chart.columns) {
    let low = 0;
    values.forEach((value, part) => {
      if (number(value) === null || value <= 0) return;
      const [y0, y1] = [y.place(low), y.place(low + value)];
      low += value;
      const d = `M${x.place(from).toFixed(1)} ${y0.toFixed(1)}H${x.place(to).toFixed(1)}V${y1.toFixed(1)}H${x.place(from).toFixed(1)}Z`;
      const phase = phaseOf(String(list(chart.parts)[part]));
      paths.set(phase, (paths.get(phase) ?? '') + d);
    });
  }
  svg.replaceChildren(
    ...frame({ ...chart, percent: true }, x, y, rounds.map((v, i) => [v, texts[i]])),
    ...Array.from(paths, ([phase, d]) => shape('path', { class: `p${PHASES.indexOf(phase)}`, d })),
  );
  svg.setAttribute('aria-label', `${chart.title}: ${Array.from(paths.keys()).join(', ')}`);
  return PHASES.filter((name) => paths.has(name));
}

// A program may log a name that is the title of another chart.
function titleOf(name, series) {
  return Object.hasOwn(TITLES, name) && !Object.hasOwn(series, TITLES[name]) ? TITLES[name] : name;
}

// One for each name that is logged, with a line for each run that logs it.
function curves(state) {
  const runs = (Array.isArray(state.curves) ? state.curves : [{ name: '', series: state.series }])
    .map((run) => ({ ...object(run), series: object(object(run).series) }));
  const series = Object.assign({}, ...runs.map((run) => run.series));
  const known = Object.keys(TITLES);
  const order = (name) => (known.includes(name) ? known.indexOf(name) : known.length);
  const has = (run, name) => Object.hasOwn(run.series, name) && points(run.series[name]).length > 0;
  return Object.keys(series)
    .filter((name) => !NOT_DRAWN.includes(name) && runs.some((run) => has(run, name)))
    .sort((a, b) => order(a) - order(b)).slice(0, MOST_CHARTS)
    .map((name) => ({
      key: `curve ${name}`,
      title: titleOf(name, series),
      unit: Object.hasOwn(UNITS, name) ? UNITS[name] : '',
      x_label: 'step',
      whole: true,
      now: runs.length === 1 ? newestText(runs[0].series[name], Object.hasOwn(UNITS, name) ? UNITS[name] : '') : '',
      marks: runs.length === 1 ? list(state.marks) : [],
      lines: runs.filter((run) => has(run, name)).map((run) => ({ name: String(run.name), points: run.series[name] })),
    }));
}

// Those that the state brings along; what a logarithm does not have is left open.
function givenCharts(state) {
  return list(state.charts).map(object).map((chart, i) => ({
    ...chart,
    key: `chart ${i}`,
    now: '',
    title: String(chart.title ?? ''),
    x_label: String(chart.x_label ?? ''),
    columns: list(chart.columns).filter((c) => Array.isArray(c) && number(c[0]) !== null && number(c[1]) !== null),
    lines: list(chart.lines).map(object).map((line) => ({
      ...line,
      name: String(line.name ?? ''),
      points: chart.log === true ? list(line.points).map((p) => (p?.[0] > 0 && p?.[1] > 0 ? p : null)) : list(line.points),
    })).filter((line) => points(line.points).length > 0),
  })).filter((chart) => chart.columns.length || chart.lines.length);
}

function legend(place, entries) {
  place.hidden = entries.length === 0;
  match(place, entries.map(([name]) => name), () => {
    const item = make('li');
    item.append(make('i'), make('span'));
    return item;
  }).forEach((item, i) => {
    classes(item.firstChild, entries[i][1]);
    say(item.lastChild, entries[i][0]);
  });
}

function drawCharts(state) {
  const charts = [...curves(state), ...givenCharts(state)];
  match(at('charts'), charts.map((chart) => chart.key), () => {
    const card = make('section', 'card chart');
    const row = make('div', 'row');
    row.append(make('h2', ''), make('span', 'now'));
    card.append(row, shape('svg', { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: 'img' }), make('ul', 'legend'), make('p', 'muted note'));
    return card;
  }).forEach((card, i) => {
    const chart = charts[i];
    const svg = card.querySelector('svg');
    say(card.querySelector('h2'), chart.title);
    say(card.querySelector('.now'), chart.now);
    if (chart.columns?.length) {
      const names = drawColumns(svg, chart);
      // The next ones have the same colours.
      legend(card.querySelector('.legend'), charts[i - 1]?.columns?.length ? [] : names.map((name) => [name, `p${PHASES.indexOf(name)}`]));
    } else {
      drawLines(svg, chart);
      legend(card.querySelector('.legend'), chart.lines.length === 1 && !chart.lines[0].reference ? []
        : chart.lines.map((line, k) => [line.name, line.reference === true ? 'reference' : `l${k % COLOURS}`]));
    }
    const note = card.querySelector('.note');
    note.hidden = !chart.note;
    say(note, String(chart.note ?? ''));
  });
}
