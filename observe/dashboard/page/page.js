// Draws a state (docs/dashboard.md): that of a run, which /events sends once a second, or the one
// that `lockstep report` and `lockstep bench` have put into this file, of a run, of two, or of a
// scaling. All text is set as textContent: what a rank prints, or calls a metric, is never markup.
'use strict';

const PHASES = ['forward', 'backward', 'data', 'communication', 'optimizer', 'evaluation', 'logging',
  'saving', 'startup', 'other'];
// What a Trainer logs, in the order of the charts; what else a program logs follows by its own name.
const TITLES = {
  loss: 'Loss', eval_loss: 'Evaluation loss', learning_rate: 'Learning rate', grad_norm: 'Gradient norm',
  tokens_per_second: 'Tokens per second', samples_per_second: 'Samples per second', step_ms: 'Step time',
  data_wait_percent: 'Waiting for data', communication_percent: 'Exposed communication',
  mfu: 'Model FLOPs utilisation', gpu_memory_gib: 'GPU memory', gpu_memory_peak_gib: 'GPU memory, peak',
  eval_accuracy: 'Evaluation accuracy', skipped_steps: 'Skipped steps',
};
const UNITS = {
  tokens_per_second: 'tokens/s', samples_per_second: 'samples/s', step_ms: 'ms', data_wait_percent: '%',
  communication_percent: '%', gpu_memory_gib: 'GiB', gpu_memory_peak_gib: 'GiB',
};
const LONG_TABLE = 24;  // rows, from which on a table opens when it is asked for

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

const isOver = (state) => !['starting', 'running'].includes(state.run.state);

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
    ...now, ...list(state.tiles).map((tile) => list(tile).map(String)),
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
  const verdict = object(state.verdict);
  const keys = findings.map((f) => JSON.stringify([f.of, f.rule, f.rank, f.cause]));
  if (verdict.text) keys.push('none');
  place.parentElement.hidden = keys.length === 0;
  match(place, keys, (key) => {
    if (key === 'none') return make('p', '');
    const box = make('div', 'finding');
    box.append(make('h3'), make('p', 'what'), make('p', 'muted'), make('p', 'do'));
    box.firstChild.append(make('span', 'rule'), make('span', 'badge warn'), make('span', 'badge good'));
    return box;
  }).forEach((box, i) => {
    if (i === findings.length) {
      classes(box, verdict.healthy === true ? 'healthy' : 'muted');
      say(box, String(verdict.text ?? ''));
      return;
    }
    const finding = findings[i];
    const rank = number(finding.rank) !== null && finding.rank >= 0 ? `rank ${finding.rank}` : 'all ranks';
    const who = finding.of ? `${finding.of}, ${rank}` : rank;
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
  table.closest('section').hidden = ranks.length === 0;
  table.classList.toggle('no-phase', !ranks.some((r) => r.phase));
  table.classList.toggle('no-collective', !ranks.some((r) => r.position));
  match(at('ranks'), ranks.map((r) => r.rank), makeRow).forEach((row, i) => drawRow(row, ranks[i]));
}

const phaseOf = (name) => (PHASES.includes(name) ? name : 'other');

// The phases that the page has colours for, and one for all others.
function shares(budget) {
  const result = new Map();
  for (const [name, value] of Object.entries(object(budget))) {
    if (number(value) === null || value <= 0) continue;
    const phase = phaseOf(name);
    result.set(phase, (result.get(phase) || 0) + value);
  }
  return result;
}

// A bar for each rank, as long as the others; of several runs each is as long as its step.
function budgetRows(state, ranks) {
  if (!Array.isArray(state.budgets)) {
    return ranks.map((rank) => ({
      name: `Rank ${rank.rank}`, budget: shares(rank.budget), failed: rank.state === 'failed', length: 1,
      text: ['running', 'ended'].includes(rank.state) && rank.step_ms ? milliseconds(rank.step_ms) : String(rank.state),
    }));
  }
  const rows = state.budgets.map(object);
  const longest = Math.max(...rows.map((row) => number(row.step_ms) ?? 0));
  return rows.map((row) => ({
    name: String(row.name ?? ''), budget: shares(row.budget), failed: false,
    length: longest > 0 ? (number(row.step_ms) ?? 0) / longest : 1, text: milliseconds(row.step_ms),
  }));
}

function drawBudget(state, ranks) {
  say(at('budget-note'), state.budget_note ? String(state.budget_note)
    : isOver(state) ? 'Where each rank spent its steps.' : 'Where each rank spent its last second.');
  const rows = budgetRows(state, ranks);
  at('budget').classList.toggle('named', Array.isArray(state.budgets));
  at('budget').parentElement.hidden = !rows.some((row) => row.budget.size > 0);
  const used = new Set();
  match(at('budget'), rows.map((row) => row.name), () => {
    const line = make('div', 'budget');
    line.append(make('span'), make('div', 'track'), make('span'));
    line.children[1].append(make('div', 'bar'));
    line.querySelector('.bar').setAttribute('role', 'img');
    return line;
  }).forEach((line, i) => {
    const { name, budget, failed, length, text } = rows[i];
    const names = PHASES.filter((phase) => budget.has(phase));
    names.forEach((phase) => used.add(phase));
    classes(line, failed ? 'budget failed' : 'budget');
    say(line.firstChild, name);
    say(line.lastChild, text);
    const bar = line.querySelector('.bar');
    bar.style.width = `${100 * length}%`;
    bar.setAttribute('aria-label', names.length
      ? names.map((phase) => `${phase} ${percent(budget.get(phase))}`).join(', ') : 'nothing measured');
    match(bar, names, () => make('i')).forEach((part, k) => {
      const of = Math.min(1, budget.get(names[k]));
      classes(part, `p${PHASES.indexOf(names[k])}${of * length < 0.25 ? ' narrow' : ''}`);
      part.style.width = `${100 * of}%`;
      part.title = `${names[k]} ${percent(budget.get(names[k]))}`;
      say(part, of * length >= 0.1 ? percent(of) : '');
    });
  });
  legend(at('legend'), PHASES.filter((name) => used.has(name)).map((name) => [name, `p${PHASES.indexOf(name)}`]));
}

function makeTable(table) {
  const long = list(table.rows).length > LONG_TABLE;
  const card = make(long ? 'details' : 'section', 'card');
  const title = make('h2', '', String(table.title ?? ''));
  const place = make('div', 'scroll');
  place.tabIndex = 0;
  place.setAttribute('role', 'region');
  place.setAttribute('aria-label', title.textContent);
  const heads = list(table.heads).map(String);
  const rows = list(table.rows).map((cells) => {
    const row = make('tr');
    row.append(...list(cells).map((text, i) => {
      const cell = make('td', '', String(text));
      cell.dataset.name = heads[i] ?? '';
      return cell;
    }));
    return row;
  });
  const [all, head, body] = [make('table', `${table.numbers === true ? 'numbers' : ''} ${heads.length < 3 ? 'short' : ''}`.trim()), make('thead'), make('tbody')];
  head.append(make('tr'));
  head.firstChild.append(...heads.map((text) => make('th', '', text)));
  body.append(...rows);
  all.append(head, body);
  place.append(all);
  card.append(long ? make('summary') : title, ...(rows.length ? [place] : []),
    ...list(table.notes).map((text) => make('p', 'muted', String(text))));
  if (long) card.firstChild.append(title);
  return card;
}

let tables = '';  // as drawn

// What a run that is over has left, or what differs between two.
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

// Who ran, how, and for how long.
function head(state, ranks) {
  const { run } = state;
  const alone = !Array.isArray(state.curves) && (ranks.length > 0 || number(run.world_size) !== null);
  const elapsed = duration(state.time - run.started);
  return [alone ? `run ${run.id ?? ''}` : run.id ?? '', alone ? `${run.world_size ?? ranks.length} ranks` : '',
    number(run.attempt) > 0 ? `restart ${run.attempt}` : '', elapsed === '–' ? '' : `${elapsed} elapsed`,
    ...list(state.about).map(String)].filter((part) => part !== '').join(' · ');
}

function draw(state) {
  state.run = object(state.run);
  const ranks = list(state.ranks).filter((r) => r !== null && typeof r === 'object');
  say(at('run-id'), head(state, ranks));
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
  drawTiles(state, ranks, object(state.series));
  drawFindings(state);
  drawStall(state);
  drawCharts(state);
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
// A file of `lockstep report` has its state inside.
const inside = at('data');
if (inside) {
  newest = JSON.parse(inside.textContent);
  at('live').hidden = true;
  draw(newest);
} else {
  connect();
}
