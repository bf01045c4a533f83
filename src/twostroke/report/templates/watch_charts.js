"use strict";
// ---- numbers for people: as twostroke.core.units writes them
const sig = (x, n = 3) => String(Number(x.toPrecision(n)));
function count(x) {
  if (x == null) return "–";
  for (const [bound, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(x) >= bound) return sig(x / bound) + suffix;
  return sig(x);
}
function bytes(x) {
  if (x == null) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) { if (Math.abs(x) < 1000) return sig(x) + " " + unit; x /= 1024; }
  return sig(x) + " TiB";
}
function seconds(x) {
  if (x == null) return "–";
  if (x === 0) return "0 s";
  if (x < 1e-3) return sig(x * 1e6) + " µs";
  if (x < 1) return sig(x * 1e3) + " ms";
  if (x < 60) return sig(x) + " s";
  if (x < 3600) return `${Math.floor(x / 60)} min ${Math.floor(x % 60)} s`;
  if (x < 86400) return `${Math.floor(x / 3600)} h ${Math.floor(x % 3600 / 60)} min`;
  return `${Math.floor(x / 86400)} d ${sig(x % 86400 / 3600)} h`;
}
const plain = x => x == null ? "–" : x !== 0 && Math.abs(x) < 1e-3 ? x.toExponential(2).replace("e-", "e−") : sig(x, 4);
const percent = x => x == null ? "–" : (100 * x).toFixed(Math.abs(x) < .0995 ? 1 : 0) + "%";
const whole = x => x == null ? "–" : Math.round(x).toLocaleString("en");

// ---- what is known of the run
const state = { generation: "", points: {}, strip: null, stripName: "", samplesMark: "", doc: null };
const $ = id => document.getElementById(id);
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) key === "class" ? node.className = value : node.setAttribute(key, value);
  node.append(...children);
  return node;
}
function svg(tag, attributes = {}, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text != null) node.textContent = text;
  return node;
}
const merge = (old, first, fresh) => old.slice(0, first).concat(fresh);

function take(doc) {
  for (const [name, values] of Object.entries(doc.points))
    state.points[name] = doc.first ? merge(state.points[name] || [], doc.first, values) : values;
  state.generation = doc.generation;
  if (doc.strip) {
    const old = state.strip && state.strip.generation === doc.strip.generation ? state.strip : null;
    state.strip = { ...doc.strip,
      steps: old ? merge(old.steps, doc.strip.first, doc.strip.steps) : doc.strip.steps,
      rows: doc.strip.rows.map((row, i) => old ? merge(old.rows[i], doc.strip.first, row) : row) };
    state.stripName = doc.strip.name;
  }
  if (doc.samples) { state.samplesMark = doc.samples_mark; showSamples(doc.samples); }
  state.doc = doc;
}

// ---- axes
function ticks(low, high, most) {
  const raw = (high - low) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(f => f * power).find(s => s >= raw * .999), found = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-9; t += step) found.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  return found;
}
function logTicks(low, high) {
  const found = [];
  for (let d = Math.floor(Math.log10(low)); d <= Math.ceil(Math.log10(high)); d++)
    for (const f of high / low < 1000 ? [1, 2, 5] : [1]) { const t = f * 10 ** d; if (t >= low && t <= high) found.push(t); }
  return found.length > 1 ? found : ticks(low, high, 4).filter(t => t > 0);
}
function binaryTicks(low, high, most) {
  const unit = 1024 ** Math.floor(Math.log(Math.max(1, high)) / Math.log(1024) + .01);
  return ticks(low / unit, high / unit, most).map(t => t * unit);
}
const quantile = (sorted, q) => sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];

/* One figure: lines or a stack over the steps, a prediction with its interval, marks, and a pointer's reading. */
function chart(box, spec) {
  const width = Math.max(240, box.clientWidth), height = spec.height || 210, m = { l: 54, r: 10, t: 10, b: 22 };
  const xs = state.points.step || [], root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": spec.label });
  const total = state.doc && state.doc.run.steps, x0 = Math.min(1, xs[0] ?? 1);
  // Room for what is still to come only once a good part is done: a young run is drawn over the whole width.
  const last = xs.length ? xs[xs.length - 1] : 1, x1 = Math.max(x0 + 1, total && last > .5 * total ? total : last);
  const X = v => m.l + (v - x0) / (x1 - x0) * (width - m.l - m.r);
  const shown = [];
  if (spec.stack) xs.forEach((_, i) => shown.push(spec.series.reduce((sum, s) => sum + (s.values[i] || 0), 0)));
  else for (const s of spec.series) for (const v of s.values) if (v != null && (!spec.log || v > 0)) shown.push(v);
  for (const d of spec.dots || []) shown.push(...d.values.filter(v => v != null));
  if (!shown.length) { box.replaceChildren(make("p", { class: "note" }, spec.empty || "Nothing yet.")); return; }
  const sorted = Float64Array.from(shown).sort();
  let low = sorted[0], high = sorted[sorted.length - 1];
  if (spec.robust) high = Math.min(high, 3 * quantile(sorted, .95));  // a first step that compiles would flatten the rest
  const ref = spec.reference && spec.reference.value != null ? spec.reference : null;
  if (ref) { low = Math.min(low, ref.low ?? ref.value, ref.value); if (ref.value < 6 * high) high = Math.max(high, Math.min(ref.high ?? ref.value, 2 * ref.value)); }
  if (spec.zero) low = Math.min(0, low);
  if (spec.log) { low *= .95; high *= 1.05; } else { const pad = (high - low || Math.abs(high) || 1) * .05; high += pad; if (!spec.zero) low -= pad; }
  const f = spec.log ? Math.log : v => v, Y = v => height - m.b - (f(v) - f(low)) / (f(high) - f(low)) * (height - m.t - m.b);
  const clip = `clip-${spec.id}`;
  root.append(svg("clipPath", { id: clip }));
  root.lastChild.append(svg("rect", { x: m.l, y: m.t - 2, width: width - m.l - m.r + 6, height: height - m.t - m.b + 2 }));
  for (const t of spec.log ? logTicks(low, high) : spec.binary ? binaryTicks(low, high, height / 46) : ticks(low, high, height / 46)) {
    root.append(svg("line", { x1: m.l, x2: width - m.r, y1: Y(t), y2: Y(t), stroke: "var(--grid)" }));
    root.append(svg("text", { x: m.l - 7, y: Y(t) + 4, "text-anchor": "end" }, spec.format(t)));
  }
  root.append(svg("text", { x: m.l - 7, y: height - 5, "text-anchor": "end" }, "step"));
  for (const t of ticks(x0, x1, width / 90).filter(t => Number.isInteger(t) && X(t) > m.l - 1)) root.append(svg("text", { x: X(t), y: height - 5, "text-anchor": "middle" }, count(t)));
  const inside = svg("g", { "clip-path": `url(#${clip})` });
  root.append(inside);
  if (ref) {
    if (ref.low != null) inside.append(svg("rect", { x: m.l, width: width - m.l - m.r, y: Y(Math.min(ref.high, high)), height: Math.max(0, Y(Math.max(ref.low, low)) - Y(Math.min(ref.high, high))), fill: "var(--shade)" }));
    inside.append(svg("line", { x1: m.l, x2: width - m.r, y1: Y(ref.value), y2: Y(ref.value), stroke: "var(--predicted)", "stroke-width": 1.6, "stroke-dasharray": "6 4" }));
  }
  const path = values => {
    let d = "", pen = false;
    values.forEach((v, i) => {
      if (v == null || (spec.log && v <= 0)) { pen = false; return; }
      d += (pen ? "L" : "M") + X(xs[i]).toFixed(1) + " " + Y(v).toFixed(1); pen = true;
    });
    return d;
  };
  if (spec.stack) {
    let floor = xs.map(() => 0);
    for (const s of spec.series) {
      const roof = floor.map((v, i) => v + (s.values[i] || 0));
      const back = floor.map((v, i) => `L${X(xs[i]).toFixed(1)} ${Y(v).toFixed(1)}`).reverse().join("");
      inside.append(svg("path", { d: path(roof) + back + "Z", fill: s.color, opacity: .85 }));
      floor = roof;
    }
  } else for (const s of spec.series)
    inside.append(svg("path", { d: path(s.values), fill: "none", stroke: s.color, "stroke-width": s.width || 1.8, "stroke-linejoin": "round", opacity: s.opacity || 1 }));
  if (xs.length === 1 && !spec.stack) for (const s of spec.series) if (s.values[0] != null) inside.append(svg("circle", { cx: X(xs[0]), cy: Y(s.values[0]), r: 3, fill: s.color }));
  for (const d of spec.dots || []) inside.append(svg("path", { d: d.values.map((v, i) => v == null ? "" : `${i ? "L" : "M"}${X(d.steps[i])} ${Y(v)}`).join(""), fill: "none", stroke: d.color, opacity: .5 }));
  for (const d of spec.dots || []) d.steps.forEach((x, i) => d.values[i] != null && inside.append(svg("circle", { cx: X(x), cy: Y(d.values[i]), r: 3.6, fill: "var(--page)", stroke: d.color, "stroke-width": 2 })));
  for (const mark of spec.marks || []) {
    if (mark.bad) inside.append(svg("line", { x1: X(mark.step), x2: X(mark.step), y1: m.t, y2: height - m.b, stroke: "var(--bad)", "stroke-width": 1.3, opacity: .7 }));
    else inside.append(svg("path", { d: `M${X(mark.step) - 4} ${height - m.b}h8l-4 -7z`, fill: "var(--soft)" }));
  }
  const cross = svg("line", { y1: m.t, y2: height - m.b, stroke: "var(--soft)", "stroke-dasharray": "2 3", visibility: "hidden" });
  root.append(cross);
  root.addEventListener("pointermove", event => {
    const at = x0 + (event.clientX - root.getBoundingClientRect().left - m.l) / (width - m.l - m.r) * (x1 - x0);
    let i = 0;
    for (let j = 1; j < xs.length; j++) if (Math.abs(xs[j] - at) < Math.abs(xs[i] - at)) i = j;
    cross.setAttribute("x1", X(xs[i])); cross.setAttribute("x2", X(xs[i])); cross.setAttribute("visibility", "visible");
    const bucket = state.doc.bucket, lines = [bucket > 1 ? `around step ${whole(xs[i])} (mean of ${bucket})` : `step ${whole(xs[i])}`];
    for (const d of spec.dots || []) { const k = d.steps.findLastIndex(s => s <= xs[i]); if (k >= 0) lines.push(`${d.name}  ${spec.format(d.values[k])} at step ${whole(d.steps[k])}`); }
    for (const s of spec.read || spec.series) lines.push(`${s.name}  ${(s.format || spec.format)(s.values[i])}`);
    tip(event, lines.join("\n"));
  });
  root.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); $("tip").hidden = true; });
  box.replaceChildren(root);
}
function tip(event, text) {
  const node = $("tip");
  node.textContent = text; node.hidden = false;
  node.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - node.offsetWidth - 6)) + "px";
  node.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - node.offsetHeight - 6)) + "px";
}

/* Values by part of the model over the steps, as colours. */
const COLOURS = [[48, 28, 96], [45, 88, 170], [22, 150, 150], [120, 200, 90], [250, 225, 60]];
function colour(share) {
  const at = Math.max(0, Math.min(.9999, share)) * (COLOURS.length - 1), i = Math.floor(at), t = at - i;
  return COLOURS[i].map((c, k) => Math.round(c + t * (COLOURS[i + 1][k] - c)));
}
function heat(box, strip) {
  const width = Math.max(240, box.clientWidth), n = strip.parts.length, row = Math.max(7, Math.min(20, 260 / n)), m = { l: 76, r: 10, t: 4, b: 42 };
  const height = m.t + n * row + m.b, values = strip.rows.flat().filter(v => v != null), share = strip.name.endsWith("_share");
  if (!values.length) { box.replaceChildren(make("p", { class: "note" }, "Nothing yet.")); return; }
  const positive = values.filter(v => v > 0);
  let low = share ? 0 : Math.min(...positive), high = share ? Math.max(.01, ...values) : Math.max(...positive);
  if (!positive.length) { low = share ? 0 : .1; high = share ? .01 : 1; }
  const place = v => share ? v / high : v <= 0 ? 0 : Math.log(v / low) / (Math.log(high / low) || 1);
  const canvas = make("canvas", { width: strip.steps.length, height: n }), context = canvas.getContext("2d");
  const image = context.createImageData(strip.steps.length, n);
  strip.rows.forEach((line, y) => line.forEach((v, x) => {
    if (v != null) image.data.set([...colour(place(v)), 255], 4 * (y * strip.steps.length + x));
  }));
  context.putImageData(image, 0, 0);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "values by part of the model" });
  const inner = width - m.l - m.r, format = share ? percent : plain;
  root.append(svg("image", { href: canvas.toDataURL(), x: m.l, y: m.t, width: inner, height: n * row, preserveAspectRatio: "none", style: "image-rendering: pixelated" }));
  const every = Math.ceil(13 / row);
  strip.parts.forEach((part, i) => i % every === 0 && root.append(svg("text", { x: m.l - 7, y: m.t + (i + .5) * row + 4, "text-anchor": "end" }, part.replace("blocks.", "block "))));
  const steps = strip.steps, at = share => steps[Math.round(share * (steps.length - 1))];
  root.append(svg("text", { x: m.l - 7, y: height - m.b + 15, "text-anchor": "end" }, "step"));
  for (const [share, anchor] of [[0, "start"], [.5, "middle"], [1, "end"]]) root.append(svg("text", { x: m.l + share * inner, y: height - m.b + 15, "text-anchor": anchor }, count(Math.round(at(share)))));
  const scale = Math.min(150, inner * .4);
  for (let i = 0; i < 30; i++) root.append(svg("rect", { x: m.l + i * scale / 30, y: height - 16, width: scale / 30 + .5, height: 9, fill: `rgb(${colour(i / 29)})` }));
  root.append(svg("text", { x: m.l - 7, y: height - 7, "text-anchor": "end" }, format(low)), svg("text", { x: m.l + scale + 7, y: height - 7 }, format(high) + (share ? "" : "  (logarithmic)")));
  root.addEventListener("pointermove", event => {
    const where = root.getBoundingClientRect(), i = Math.floor((event.clientY - where.top - m.t) / row);
    const j = Math.floor((event.clientX - where.left - m.l) / inner * steps.length);
    if (strip.rows[i] && j >= 0 && j < steps.length) tip(event, `step ${whole(steps[j])}\n${strip.parts[i]}  ${format(strip.rows[i][j])}`);
    else $("tip").hidden = true;
  });
  root.addEventListener("pointerleave", () => { $("tip").hidden = true; });
  box.replaceChildren(root);
}
