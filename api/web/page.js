"use strict";
// The page asks the API of the controller that served it, once a second, and keeps the series it draws in memory.

const LOOK_MS = 1000;
const MOST_POINTS = 900;
const $ = (id) => document.getElementById(id);
const series = [];
let group = new URLSearchParams(location.search).get("group");
let heat = null;
let marks = [];
let looks = 0;

async function ask(path) {
  const token = sessionStorage.getItem("eplane-token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store" });
  if (answer.status === 401) {
    await login();
    throw new Error("a token is needed");
  }
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.detail || `status ${answer.status}`);
  return body;
}

function login() {
  const box = $("login");
  if (!box.open) box.showModal();
  return new Promise((done) => box.addEventListener("close", () => {
    sessionStorage.setItem("eplane-token", $("token").value.trim());
    done();
  }, { once: true }));
}

const fixed = (value) => (typeof value === "number" ? value.toFixed(3) : "–");
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function text(id, value) {
  $(id).textContent = value === null || value === undefined ? "–" : String(value);
}

async function groups() {
  const found = (await ask("/v1/groups")).groups.map((one) => one.group);
  if (!group || !found.includes(group)) group = found[0];
  $("group").replaceChildren(...found.map((name) => new Option(name, name, false, name === group)));
}

function showStatus(status) {
  const balance = status.balancedness || {};
  text("now", fixed(balance.now));
  text("mean", fixed(balance.mean));
  text("epoch", status.epoch);
  text("agents", status.agents);
  text("verdict", status.verdict ? status.verdict.sentence : "no verdict yet");
  text("mode", status.paused ? `${status.mode}, paused` : status.mode);
  $("mode").classList.toggle("bad", Boolean(status.paused));
  showLeader(status);
  showMigration(status.migration);
  if (typeof balance.now === "number") {
    series.push({ at: Date.now(), value: balance.now });
    if (series.length > MOST_POINTS) series.shift();
  }
}

// Agents report to the leader alone: the page of another controller points there for the load.
function showLeader(status) {
  if (!status.leader) return text("leader", "no leader");
  const link = document.createElement("a");
  link.textContent = `led by ${status.leader.id}`;
  if (status.leads_here === false) {
    link.href = `${status.leader.url}/?group=${encodeURIComponent(group)}`;
    link.textContent += ", open its page for the load";
  }
  return $("leader").replaceChildren(link);
}

function showMigration(migration) {
  const waves = migration && Array.isArray(migration.waves) ? migration.waves : [];
  const live = waves.filter((wave) => ["SWITCHING", "RETIRED"].includes(wave.state)).length;
  const count = waves.length ? `, ${live}/${waves.length} waves` : "";
  text("migration", migration ? `${migration.state.toLowerCase()}${count}` : "none");
  const bar = $("waves");
  bar.hidden = !waves.length;
  bar.max = waves.length || 1;
  bar.value = live;
}

// A canvas in CSS pixels, sharp on dense screens.
function pen(canvas) {
  const width = canvas.clientWidth, height = Number(canvas.getAttribute("height"));
  const dense = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * dense)) canvas.width = Math.round(width * dense);
  if (!canvas.dataset.height) canvas.dataset.height = height;
  const tall = Number(canvas.dataset.height);
  canvas.style.height = `${tall}px`;
  canvas.height = Math.round(tall * dense);
  const draw = canvas.getContext("2d");
  draw.setTransform(dense, 0, 0, dense, 0, 0);
  draw.clearRect(0, 0, width, tall);
  draw.font = "11px system-ui, sans-serif";
  return { draw, width, height: tall };
}

function drawSeries() {
  const { draw, width, height } = pen($("series"));
  const left = 30, bottom = height - 18, top = 6;
  const y = (value) => bottom - (bottom - top) * value;
  draw.strokeStyle = color("--line");
  draw.fillStyle = color("--quiet");
  for (const mark of [0, 0.25, 0.5, 0.75, 1]) {
    draw.beginPath();
    draw.moveTo(left, y(mark));
    draw.lineTo(width, y(mark));
    draw.stroke();
    draw.fillText(mark.toFixed(2), 2, y(mark) + 4);
  }
  if (series.length < 2) return;
  const first = series[0].at, span = Math.max(series[series.length - 1].at - first, 1);
  const x = (at) => left + (width - left - 4) * (at - first) / span;
  draw.fillText(`${Math.round(span / 1000)} s ago`, left, height - 4);
  draw.fillText("now", width - 26, height - 4);
  draw.strokeStyle = color("--warm");
  draw.fillStyle = color("--warm");
  for (const mark of marks.filter((one) => one.at >= first)) {
    draw.beginPath();
    draw.moveTo(x(mark.at), top);
    draw.lineTo(x(mark.at), bottom);
    draw.stroke();
    draw.fillText(mark.epoch, x(mark.at) + 3, bottom - 3);
  }
  draw.strokeStyle = color("--main");
  draw.lineWidth = 2;
  draw.beginPath();
  series.forEach((point, index) => (index ? draw.lineTo : draw.moveTo).call(draw, x(point.at), y(point.value)));
  draw.stroke();
  draw.lineWidth = 1;
}

function mix(from, to, part) {
  const parse = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const a = parse(from), b = parse(to);
  return `rgb(${a.map((one, at) => Math.round(one + (b[at] - one) * part)).join(",")})`;
}

function drawHeat() {
  const { draw, width, height } = pen($("heat"));
  if (!heat || !heat.length) return;
  const left = 44, bottom = height - 18;
  const layers = heat.length, ranks = heat[0].length;
  const w = (width - left) / ranks, h = bottom / layers;
  const cold = color("--cold"), even = color("--line"), warm = color("--warm");
  heat.forEach((row, layer) => {
    const mean = row.reduce((a, b) => a + b, 0) / ranks;
    row.forEach((tokens, rank) => {
      const steps = mean > 0 ? Math.max(-1, Math.min(1, Math.log2(Math.max(tokens / mean, 1e-3)))) : 0;
      draw.fillStyle = steps < 0 ? mix(even, cold, -steps) : mix(even, warm, steps);
      draw.fillRect(left + rank * w, layer * h, Math.max(w - 1, 1), Math.max(h - 1, 1));
    });
  });
  draw.fillStyle = color("--quiet");
  const every = Math.ceil(layers / 12), across = Math.ceil(ranks / 16);
  for (let layer = 0; layer < layers; layer += every) draw.fillText(`layer ${layer}`, 2, layer * h + Math.min(h, 14));
  for (let rank = 0; rank < ranks; rank += across) draw.fillText(`rank ${rank}`, left + rank * w + 2, height - 4);
}

function explainCell(event) {
  if (!heat || !heat.length) return;
  const box = $("heat").getBoundingClientRect();
  const rank = Math.floor((event.clientX - box.left - 44) / ((box.width - 44) / heat[0].length));
  const layer = Math.floor((event.clientY - box.top) / ((box.height - 18) / heat.length));
  const row = heat[layer];
  if (!row || row[rank] === undefined) return;
  const mean = row.reduce((a, b) => a + b, 0) / row.length || 1;
  const part = (row[rank] / mean).toFixed(2);
  text("cell", `layer ${layer}, rank ${rank}: ${Math.round(row[rank])} tokens, ${part} of the mean`);
}

function showHistory(answer) {
  marks = answer.map((row) => ({ at: row.at * 1000, epoch: row.epoch }));
  const heads = ["epoch", "at", "kind", "moves", "bytes", "predicted_gain_s", "measured_gain_s", "actor", "reason"];
  const line = (cells, kind) => {
    const tr = document.createElement("tr");
    for (const cell of cells) {
      const one = document.createElement(kind);
      one.textContent = cell;
      tr.append(one);
    }
    return tr;
  };
  const show = (key, value) => (key === "at" && typeof value === "number"
    ? new Date(value * 1000).toLocaleString() : typeof value === "number" && !Number.isInteger(value)
      ? value.toFixed(3) : String(value ?? ""));
  $("history").replaceChildren(
    line(heads.map((key) => key.replaceAll("_", " ")), "th"),
    ...answer.map((row) => line(heads.map((key) => show(key, row[key])), "td")));
}

// What the controller remembers from before this page was opened.
function seed(points) {
  const known = points.map((point) => ({ at: point.at * 1000, value: point.balancedness }));
  series.unshift(...known.filter((point) => !series.length || point.at < series[0].at));
}

async function look() {
  try {
    if (looks % 15 === 0) await groups();
    const base = `/v1/groups/${encodeURIComponent(group)}`;
    const [status, load] = await Promise.all([ask(`${base}/status`), ask(`${base}/load`)]);
    showStatus(status);
    heat = load.rank_load || null;
    if (!series.length || series.length < (load.history || []).length / 2) seed(load.history || []);
    if (looks % 5 === 0) showHistory(await ask(`${base}/history?limit=20`));
    looks += 1;
    drawSeries();
    drawHeat();
    $("connection").textContent = "";
    $("connection").classList.remove("bad");
  } catch (error) {
    $("connection").textContent = error.message;
    $("connection").classList.add("bad");
  }
  setTimeout(look, LOOK_MS);
}

$("group").addEventListener("change", (event) => {
  group = event.target.value;
  series.length = 0;
  looks = 1;
  history.replaceState(null, "", `?group=${encodeURIComponent(group)}`);
});
$("heat").addEventListener("mousemove", explainCell);
window.addEventListener("resize", () => { drawSeries(); drawHeat(); });
look();
