// Draws the run's state, which /events sends once a second. All text is set as textContent: what a
// rank prints, or calls a metric, is never markup.
'use strict';

const SVG = 'http://www.w3.org/2000/svg';
const PHASES = ['forward', 'backward', 'data', 'communication', 'optimizer', 'evaluation', 'logging',
  'saving', 'startup', 'other'];
// What a Trainer logs, in the order of the charts; what else a program logs follows by its own name.
const TITLES = {
  loss: 'Loss', eval_loss: 'Evaluation loss', learning_rate: 'Learning rate', grad_norm: 'Gradient norm',
  tokens_per_second: 'Tokens per second', samples_per_second: 'Samples per second', step_ms: 'Step time',
  data_wait_percent: 'Waiting for data', communication_percent: 'Exposed communication',
  eval_accuracy: 'Evaluation accuracy', skipped_steps: 'Skipped steps',
};
const UNITS = {
  tokens_per_second: 'tokens/s', samples_per_second: 'samples/s', step_ms: 'ms', data_wait_percent: '%',
  communication_percent: '%',
};
// Of an evaluation itself, which nobody follows over steps.
const NOT_DRAWN = ['eval_runtime', 'eval_samples_per_second'];
const MOST_CHARTS = 12;

const at = (id) => document.getElementById(id);
const number = (value) => (typeof value === 'number' && Number.isFinite(value) ? value : null);
const list = (value) => (Array.isArray(value) ? value : []);
const object = (value) => (value !== null && typeof value === 'object' ? value : {});

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// Only what differs is written, so that a selection, the focus and a screen reader are left alone.
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function classes(element, name) {
  if (element.className !== name) element.className = name;
}

// The children of `parent` become one for each key, in that order; others go.
function match(parent, keys, create) {
  const before = new Map(Array.from(parent.children, (child) => [child.dataset.key, child]));
  const result = keys.map((key) => {
    const name = String(key);
    let child = before.get(name);
    before.delete(name);
    if (!child) {
      child = create(key);
      child.dataset.key = name;
    }
    return child;
  });
  for (const child of before.values()) child.remove();
  result.forEach((child, i) => {
    if (parent.children[i] !== child) parent.insertBefore(child, parent.children[i] || null);
  });
  return result;
}

// ---------------------------------------------------------------- figures as text

function figure(value) {
  if (number(value) === null) return '–';
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(2)} G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  if (size >= 1e5) return `${(value / 1e3).toFixed(0)} K`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)} K`;
  if (size >= 100 || Number.isInteger(value)) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1);
  if (size >= 0.1 || size === 0) return value.toFixed(3);
  return size >= 0.001 ? value.toPrecision(3) : value.toExponential(2);
}

function bytes(value) {
  if (number(value) === null) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  let rest = value;
  while (rest >= 1024 && unit < units.length - 1) { rest /= 1024; unit += 1; }
  return `${rest >= 100 || unit === 0 ? rest.toFixed(0) : rest.toFixed(1)} ${units[unit]}`;
}

function milliseconds(value) {
  if (!number(value)) return '–';
  return value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${figure(value)} ms`;
}

function duration(seconds) {
  if (number(seconds) === null || seconds < 0) return '–';
  const whole = Math.floor(seconds);
  const pad = (n) => String(n).padStart(2, '0');
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor(whole / 60) % 60;
  return hours > 0 ? `${hours}:${pad(minutes)}:${pad(whole % 60)}` : `${minutes}:${pad(whole % 60)}`;
}

const ageText = (seconds) => (seconds < 10 ? seconds.toFixed(3) : figure(seconds));

const percent = (share) => `${(100 * share).toFixed(share < 0.1 && share > 0 ? 1 : 0)} %`;

// Of those that are known: 0 is not.
function median(values) {
  const sorted = values.filter(number).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

function points(series) {
  return list(series).filter((p) => Array.isArray(p) && number(p[0]) !== null && number(p[1]) !== null);
}

// The newest value as text. A program logs one that is not finite as null.
function newestText(series, unit) {
  const last = list(series).at(-1);
  if (!Array.isArray(last)) return '–';
  if (last[1] === null) return 'not finite';
  return unit === '%' ? percent(last[1] / 100) : `${figure(last[1])} ${unit}`.trim();
}

const isOver = (state) => ['ended', 'failed', 'killed'].includes(state.run.state);

// ---------------------------------------------------------------- parts of the page

function drawTiles(state, ranks, series) {
  const last = (name) => (points(series[name]).at(-1) || [])[1];
  const running = ranks.filter((r) => r.state === 'running').length;
  const gpus = ranks.map((r) => object(r.gpu).utilisation_percent).filter((v) => number(v) !== null);
  const cores = ranks.map((r) => r.cores).filter((v) => number(v) !== null);
  const steps = ranks.map((r) => r.step).filter((v) => number(v) !== null && v >= 0);
  const stalled = state.stall ? number(object(state.stall).seconds) : null;
  const time = stalled === null ? median(ranks.map((r) => r.step_ms)) : null;
  const rate = ['tokens_per_second', 'samples_per_second'].find((name) => points(series[name]).length);
  const throughput = stalled !== null ? ['–', ''] : rate ? [figure(last(rate)), UNITS[rate]] : [time ? figure(1000 / time) : '–', 'steps/s'];
  const total = number(state.run.total_steps);
  const logged = (name) => (list(series[name]).length ? [[TITLES[name], newestText(series[name], ''), '']] : []);
  const known = (is, tile) => (is ? [tile] : []);
  const left = number(state.run.left_s);
  // What was used last is not what a run uses that is over.
  const now = isOver(state) ? [] : [
    ['Ranks running', `${running}`, `of ${number(state.run.world_size) ?? ranks.length}`],
    gpus.length
      ? ['GPU utilisation', (gpus.reduce((a, b) => a + b, 0) / gpus.length).toFixed(0), '% mean']
      : ['CPU', cores.length ? cores.reduce((a, b) => a + b, 0).toFixed(2) : '–', 'cores'],
  ];
  const tiles = [
    ...known(steps.length, ['Step', steps.length ? Math.max(...steps).toLocaleString('en') : '–',
      total === null ? '' : `of ${total.toLocaleString('en')}`]),
    ...known(left !== null && !lost, ['Time left', duration(left), '']),
    ...logged('loss'), ...logged('eval_loss'), ...logged('learning_rate'), ...logged('grad_norm'),
    ...known(rate || time || stalled !== null, ['Throughput', ...throughput]),
    ...known(time || stalled !== null, stalled === null ? ['Step time', ...(milliseconds(time || null).split(' ')), '']
      : ['Step time', '–', `no step for ${stalled.toFixed(0)} s`]),
    ...now,
  ];
  at('tiles').hidden = tiles.length === 0;
  match(at('tiles'), tiles.map((t) => t[0]), (title) => {
    const tile = make('div', 'tile');
    tile.append(make('p', 'muted', title), make('p', 'value'));
    tile.lastChild.append(make('span', 'figure'), document.createTextNode(' '), make('span', 'unit'));
    return tile;
  }).forEach((tile, i) => {
    say(tile.querySelector('.figure'), tiles[i][1]);
    say(tile.querySelector('.unit'), tiles[i][2] || '');
  });
}

function drawFindings(state) {
  const findings = list(state.findings);
  const place = at('findings');
  const keys = findings.length
    ? findings.map((f) => JSON.stringify([f.rule, f.rank, f.cause]))
    : ['none'];
  match(place, keys, (key) => {
    if (key === 'none') return make('p', '');
    const box = make('div', 'finding');
    box.append(make('h3'), make('p', 'what'), make('p', 'muted'), make('p', 'do'));
    box.firstChild.append(make('span', 'rule'), make('span', 'badge warn'), make('span', 'badge good'));
    return box;
  }).forEach((box, i) => {
    if (!findings.length) {
      const verdict = object(state.verdict);
      classes(box, verdict.healthy === true ? 'healthy' : 'muted');
      say(box, String(verdict.text ?? ''));
      return;
    }
    const finding = findings[i];
    const who = number(finding.rank) !== null && finding.rank >= 0 ? `rank ${finding.rank}` : 'all ranks';
    const gain = number(finding.gain) || 0;
    say(box.querySelector('.rule'), String(finding.rule));
    say(box.querySelector('.badge.warn'), finding.cause ? `${who}: ${finding.cause}` : who);
    const good = box.querySelector('.badge.good');
    good.hidden = gain <= 0;
    say(good, `expected gain about ${percent(gain)}`);
    say(box.querySelector('.what'), String(finding.what ?? ''));
    say(box.querySelector('.muted'), finding.evidence ? `Evidence: ${finding.evidence}` : '');
    say(box.querySelector('.do'), finding.remedy ? `Change: ${finding.remedy}` : '');
  });
}

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

function drawCurve(svg, series, title, unit) {
  const values = points(series);
  const [width, height, left, bottom, top, right] = [360, 170, 46, 22, 10, 8];
  const xs = values.map((p) => p[0]);
  const ys = values.map((p) => p[1]);
  let [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  if (x0 === x1) x1 = x0 + 1;
  const margin = (y1 - y0) * 0.08 || Math.abs(y1) * 0.1 || 1;
  y0 = y0 >= 0 ? Math.max(0, y0 - margin) : y0 - margin;
  y1 += margin;
  const x = (v) => left + ((v - x0) / (x1 - x0)) * (width - left - right);
  const y = (v) => height - bottom - ((v - y0) / (y1 - y0)) * (height - top - bottom);
  const parts = [];
  const lines = ticks(y0, y1, 4);
  const texts = tickTexts(lines);
  for (const [i, tick] of lines.entries()) {
    parts.push(shape('line', { class: 'grid', x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
    const label = shape('text', { class: 'axis', x: left - 7, y: y(tick) + 4, 'text-anchor': 'end' });
    label.textContent = texts[i];
    parts.push(label);
  }
  for (const tick of ticks(x0, x1, 5).filter(Number.isInteger)) {
    const label = shape('text', { class: 'axis', x: x(tick), y: height - 5, 'text-anchor': 'middle' });
    label.textContent = tick.toLocaleString('en');
    parts.push(label);
  }
  const axis = shape('text', { class: 'axis', x: left - 18, y: height - 5, 'text-anchor': 'end' });
  axis.textContent = 'step';
  parts.push(axis);
  const pieces = stretches(series).map((some) => {
    const line = some.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join('L');
    const [first, last] = [x(some[0][0]), x(some.at(-1)[0])];
    return [`M${line}`, `M${first},${y(y0)}L${line}L${last},${y(y0)}Z`];
  });
  const end = values.at(-1);
  parts.push(
    shape('path', { class: 'under', d: pieces.map((piece) => piece[1]).join('') }),
    shape('path', { class: 'curve', d: pieces.map((piece) => piece[0]).join('') }),
    shape('circle', { class: 'end', cx: x(end[0]), cy: y(end[1]), r: 3.5 }),
  );
  svg.replaceChildren(...parts);
  svg.setAttribute('aria-label', `${title}: ${figure(end[1])} ${unit} at step ${end[0]}; between ` +
    `${figure(Math.min(...ys))} and ${figure(Math.max(...ys))} since step ${x0}`);
}

// A program may log a name that is the title of another chart.
function titleOf(name, series) {
  return Object.hasOwn(TITLES, name) && !Object.hasOwn(series, TITLES[name]) ? TITLES[name] : name;
}

function drawCharts(series) {
  const known = Object.keys(TITLES);
  const rank = (name) => (known.includes(name) ? known.indexOf(name) : known.length);
  const names = Object.keys(series)
    .filter((name) => points(series[name]).length > 0 && !NOT_DRAWN.includes(name))
    .sort((a, b) => rank(a) - rank(b)).slice(0, MOST_CHARTS);
  match(at('charts'), names, (name) => {
    const card = make('section', 'card chart');
    const row = make('div', 'row');
    row.append(make('h2', ''), make('span', 'now'));
    card.append(row, shape('svg', { viewBox: '0 0 360 170', role: 'img' }));
    return card;
  }).forEach((card, i) => {
    const values = list(series[names[i]]);
    const unit = Object.hasOwn(UNITS, names[i]) ? UNITS[names[i]] : '';
    say(card.querySelector('h2'), titleOf(names[i], series));
    say(card.querySelector('.now'), newestText(values, unit));
    drawCurve(card.querySelector('svg'), values, card.querySelector('h2').textContent, unit);
  });
}

function meter(cell, share, text, sub) {
  if (!cell.firstChild) {
    const bar = make('div', 'meter');
    bar.append(make('i'));
    cell.append(make('span', 'text'), bar, make('span', 'sub'));
  }
  say(cell.querySelector('.text'), text);
  say(cell.querySelector('.sub'), sub);
  const bar = cell.querySelector('.meter');
  bar.hidden = share === null;
  bar.firstChild.style.width = `${Math.min(100, Math.max(0, 100 * (share ?? 0)))}%`;
}

const STATES = {
  running: 'good', failed: 'bad', killed: 'bad', ended: '', starting: 'warn', stopped: 'warn',
  stalled: 'warn',
};
const tone = (state) => `badge ${Object.hasOwn(STATES, state) ? STATES[state] : ''}`.trim();

function makeRow() {
  const row = make('tr');
  for (const name of ['', 'State', 'Step', 'Step time', 'Phase', 'Utilisation', 'Memory',
    'Last collective']) {
    const cell = make('td', name === '' ? 'rank' : '');
    if (name !== '') cell.dataset.name = name;
    row.append(cell);
  }
  const [rank, state] = row.children;
  rank.append(make('span'), make('span', 'sub'));
  state.append(make('span'));
  row.children[7].append(make('span'), make('span', 'sub'));
  return row;
}

function drawRow(row, rank) {
  const cells = row.children;
  const failed = rank.state === 'failed';
  classes(row, failed ? 'failed' : '');
  say(cells[0].firstChild, `Rank ${rank.rank}`);
  say(cells[0].lastChild, `host ${rank.host ?? 0}${number(rank.pid) === null ? '' : `, pid ${rank.pid}`}`);
  classes(cells[1].firstChild, tone(rank.state));
  say(cells[1].firstChild, failed && rank.exit ? `failed: ${rank.exit}` : String(rank.state));
  say(cells[2], number(rank.step) !== null && rank.step >= 0 ? rank.step.toLocaleString('en') : '–');
  say(cells[3], milliseconds(rank.step_ms));
  say(cells[4], String(rank.phase || '–'));
  const gpu = object(rank.gpu);
  const cores = number(rank.cores);
  if (number(gpu.utilisation_percent) !== null) {
    const power = number(gpu.power_w) !== null ? `, ${gpu.power_w.toFixed(0)} W` : '';
    meter(cells[5], gpu.utilisation_percent / 100, `${gpu.utilisation_percent} %`,
      `GPU ${gpu.index ?? ''}${power}`);
  } else {
    meter(cells[5], null, cores === null ? '–' : `${cores.toFixed(2)} cores`,
      number(rank.threads) !== null ? `${rank.threads} thread${rank.threads === 1 ? '' : 's'}` : '');
  }
  const total = number(gpu.memory_total_bytes);
  if (total !== null && number(gpu.memory_used_bytes) !== null) {
    meter(cells[6], gpu.memory_used_bytes / total, bytes(gpu.memory_used_bytes),
      `of ${bytes(total)}, host ${bytes(rank.resident_bytes)}`);
  } else {
    meter(cells[6], null, bytes(rank.resident_bytes), 'resident');
  }
  const position = rank.position === null || rank.position === undefined ? null : object(rank.position);
  say(cells[7].firstChild, position ? `${position.operation} #${position.sequence}` : '–');
  say(cells[7].lastChild, position
    ? `${position.state}${number(position.age_s) !== null ? `, ${ageText(position.age_s)} s ago` : ''}` : '');
}

// What no rank has, as a record and a script have no collective, is left away.
function drawRanks(ranks) {
  const table = at('ranks').parentElement;
  table.classList.toggle('no-phase', !ranks.some((r) => r.phase));
  table.classList.toggle('no-collective', !ranks.some((r) => r.position));
  match(at('ranks'), ranks.map((r) => r.rank), makeRow).forEach((row, i) => drawRow(row, ranks[i]));
}

// The phases that the page has colours for, and one for all others.
function shares(budget) {
  const result = new Map();
  for (const [name, value] of Object.entries(object(budget))) {
    if (number(value) === null || value <= 0) continue;
    const phase = PHASES.includes(name) ? name : 'other';
    result.set(phase, (result.get(phase) || 0) + value);
  }
  return result;
}

function drawBudget(state, ranks) {
  say(at('budget-note'), isOver(state) ? 'Where each rank spent its steps.' : 'Where each rank spent its last second.');
  at('budget').parentElement.hidden = !ranks.some((r) => shares(r.budget).size > 0);
  const used = new Set();
  match(at('budget'), ranks.map((r) => r.rank), () => {
    const line = make('div', 'budget');
    line.append(make('span'), make('div', 'bar'), make('span'));
    line.children[1].setAttribute('role', 'img');
    return line;
  }).forEach((line, i) => {
    const rank = ranks[i];
    const budget = shares(rank.budget);
    const names = PHASES.filter((name) => budget.has(name));
    names.forEach((name) => used.add(name));
    classes(line, rank.state === 'failed' ? 'budget failed' : 'budget');
    say(line.firstChild, `Rank ${rank.rank}`);
    say(line.lastChild, rank.state === 'running' ? milliseconds(rank.step_ms) : String(rank.state));
    const bar = line.children[1];
    bar.setAttribute('aria-label', names.length
      ? names.map((name) => `${name} ${percent(budget.get(name))}`).join(', ') : 'nothing measured');
    match(bar, names, (name) => make('i', `p${PHASES.indexOf(name)}`)).forEach((part, k) => {
      const share = budget.get(names[k]);
      part.style.width = `${100 * Math.min(1, share)}%`;
      part.title = `${names[k]} ${percent(share)}`;
    });
  });
  match(at('legend'), PHASES.filter((name) => used.has(name)), (name) => {
    const item = make('li');
    item.append(make('i', `p${PHASES.indexOf(name)}`), make('span', '', name));
    return item;
  });
}

function makeTable(table) {
  const card = make('section', 'card');
  const title = make('h2', '', String(table.title ?? ''));
  card.append(title);
  const heads = list(table.heads).map(String);
  if (list(table.rows).length) {
    const place = make('div', 'scroll');
    place.tabIndex = 0;
    place.setAttribute('role', 'region');
    place.setAttribute('aria-label', title.textContent);
    const rows = list(table.rows).map((cells) => {
      const row = make('tr');
      row.append(...list(cells).map((text, i) => {
        const cell = make('td', '', String(text));
        cell.dataset.name = heads[i] ?? '';
        return cell;
      }));
      return row;
    });
    const [all, head, body] = [make('table', table.numbers === true ? 'numbers' : ''), make('thead'), make('tbody')];
    head.append(make('tr'));
    head.firstChild.append(...heads.map((text) => make('th', '', text)));
    body.append(...rows);
    all.append(head, body);
    place.append(all);
    card.append(place);
  }
  card.append(...list(table.notes).map((text) => make('p', 'muted', String(text))));
  return card;
}

let tables = '';  // as drawn

// What a run that is over has left, as its report lists it.
function drawTables(state) {
  const text = JSON.stringify(list(state.tables));
  if (text === tables) return;
  tables = text;
  at('tables').replaceChildren(...list(state.tables).map((table) => makeTable(object(table))));
}

// The newest one of the run, also after the ranks have moved again.
function drawStall(state) {
  const table = object(state.stall_table);
  at('stall').hidden = !table.text;
  const time = number(table.time);
  say(at('stall-time'), time === null ? '' : new Date(time * 1000).toLocaleTimeString());
  say(at('stall-table'), String(table.text ?? ''));
}

let chosen = false;  // by the user

function drawLog(state) {
  const log = object(state.log);
  const pick = at('log-rank');
  const names = Object.keys(log).sort((a, b) => Number(a) - Number(b));
  // A record has no output.
  at('output').hidden = state.run.recorded === true && !names.some((name) => list(log[name]).length);
  match(pick, names, (name) => {
    const option = make('option', '', name);
    option.value = name;
    return option;
  });
  // Whoever has not chosen a rank sees the one that failed, if it said something.
  const failed = list(state.ranks).find((r) => object(r).state === 'failed');
  if (failed && !chosen && list(log[failed.rank]).length) pick.value = String(failed.rank);
  const place = at('log');
  const atEnd = place.scrollTop + place.clientHeight >= place.scrollHeight - 8;
  const lines = list(log[pick.value]).map(String);
  say(place, lines.length ? lines.join('\n') : 'No output yet.');
  if (atEnd) place.scrollTop = place.scrollHeight;
}

// ---------------------------------------------------------------- the state, and its arrival

let newest = null;
let over = false;
let lost = false;

// What stands above everything else, and whether it is bad.
function banner(state, ranks) {
  if (lost) {
    const [who, next] = state.run.recorded === true ? ['lockstep dashboard', '']
      : ['the launcher', ' If the run is over, lockstep dashboard DIR shows what it has recorded in its output_dir.'];
    return [`Connection lost: ${who} does not answer. This is the last state that it sent.${next}`, true];
  }
  const failed = ranks.filter((r) => r.state === 'failed');
  if (failed.length && !(isOver(state) && state.run.message)) {
    const who = failed.map((r) => `Rank ${r.rank} failed${r.exit ? ` (${r.exit})` : ''}`).join('. ');
    return [`${who}.`, true];
  }
  if (state.stall) return [String(object(state.stall).what ?? ''), true];
  return [String(state.run.message || ''), state.run.state === 'failed' || state.run.state === 'killed'];
}

function draw(state) {
  state.run = object(state.run);
  const ranks = list(state.ranks).filter((r) => r !== null && typeof r === 'object');
  const series = object(state.series);
  const attempt = number(state.run.attempt) > 0 ? `restart ${state.run.attempt}` : '';
  const elapsed = duration(state.time - state.run.started);
  say(at('run-id'), [`run ${state.run.id ?? ''}`, `${state.run.world_size ?? ranks.length} ranks`, attempt,
    elapsed === '–' ? '' : `${elapsed} elapsed`].filter((part) => part !== '').join(' · '));
  const failed = ranks.some((r) => r.state === 'failed');
  const now = state.stall ? 'stalled' : String(state.run.state);
  const shown = failed && state.run.state === 'running' ? 'failed' : now;
  classes(at('state'), lost ? 'badge' : tone(shown));
  say(at('state'), lost ? `was ${shown}` : shown);
  document.body.classList.toggle('lost', lost);
  document.title = `${shown} – Lockstep ${state.run.id ?? ''}`;
  const [text, bad] = banner(state, ranks);
  at('banner').hidden = text === '';
  classes(at('banner'), bad ? 'banner bad' : 'banner');
  say(at('banner'), text);
  drawTiles(state, ranks, series);
  drawFindings(state);
  drawStall(state);
  drawCharts(series);
  drawRanks(ranks);
  drawBudget(state, ranks);
  drawTables(state);
  drawLog(state);
  const time = number(state.time);
  if (time !== null) {
    const date = new Date(time * 1000);
    say(at('updated'), state.run.recorded === true ? `Recorded until ${date.toLocaleString()}. What the ranks printed is not recorded; lockstep run --log-dir writes it to files.`
      : `Updated ${date.toLocaleTimeString()}`);
  }
}

function connection(text, mark) {
  classes(at('live'), `live ${mark}`.trim());
  say(at('live-text'), text);
  const before = lost;
  lost = mark === 'bad';
  if (lost !== before && newest) draw(newest);
}

function connect() {
  const events = new EventSource('/events');
  events.onopen = () => connection('live', 'good');
  events.onmessage = (event) => {
    newest = JSON.parse(event.data);
    const run = object(newest.run);
    const done = run.recorded === true && run.state !== 'running';
    connection(done ? 'recorded' : 'live', done ? '' : 'good');
    draw(newest);
  };
  events.addEventListener('end', () => {
    over = true;
    events.close();
    connection('run is over', '');
  });
  // The browser connects again by itself, unless the answer was a refusal.
  events.onerror = () => {
    if (over) return;
    connection('connection lost', 'bad');
    if (events.readyState === EventSource.CLOSED) setTimeout(connect, 2000);
  };
}

// The token has become a cookie; in the address it would end up in the history and in screenshots.
if (location.search) history.replaceState(null, '', location.pathname);
at('log-rank').addEventListener('change', () => {
  chosen = true;
  if (newest) drawLog(newest);
  at('log').scrollTop = at('log').scrollHeight;
});
connect();
