// ---- the figures of the page
const STRIPS = { block_grad_norms: "gradient norm", update_ratios: "update ÷ weight", residual_rms: "residual stream, RMS", residual_max: "residual stream, largest |x|",
  rank_compute_s: "seconds of computing", rank_waiting_s: "seconds of waiting", mlp_rms: "MLP inside, RMS", mlp_max: "MLP inside, largest |x|", mlp_zero_share: "MLP inside, share of zeros", mlp_dead_share: "MLP inside, dead channels" };
const RANKS = [["computing", "computing_s", "#2f7fe0"], ["waiting for the wire", "wire_s", "#d9730d"], ["waiting for others", "waiting_s", "#8b5cf6"]];
const PARTS = [["forward", "forward_s", "#2f7fe0"], ["backward", "backward_s", "#0a9396"], ["optimizer", "optimizer_s", "#8b5cf6"], ["data", "data_s", "#d9730d"]];
const WINDOWS = [[5, "#d9730d"], [50, "#2f7fe0"]];
const blue = "var(--measured)", DOTS = ["#0a9396", "#8b5cf6", "#d6455d"];
let smoothing = .8, logLoss = false;
function smooth(values) {
  let mean = 0, weight = 0;
  return values.map(v => {
    if (v == null) return weight ? mean / weight : null;
    mean = smoothing * mean + (1 - smoothing) * v; weight = smoothing * weight + 1 - smoothing;
    return mean / weight;
  });
}
const guess = name => (state.doc.predicted[name] && state.doc.predicted[name].value != null) ? state.doc.predicted[name] : null;
const anyOf = series => series.some(s => s.values.some(v => v != null));
const line = (name, key, more = {}) => ({ name, values: state.points[key] || [], color: blue, ...more });
const figures = {
  loss: { title: "Loss", wide: true, draw(box) {
    const raw = line("loss", "loss", { opacity: smoothing ? .35 : 1, width: smoothing ? 1.2 : 1.8 }), series = [raw];
    if (smoothing) series.push({ name: "smoothed", values: smooth(raw.values), color: blue, width: 2.2 });
    legend("loss", [["nats a token", blue], ...(state.doc.checkpoints.length ? [["▲ checkpoint", null]] : []), ...(state.doc.events.length ? [["step not taken", "var(--bad)"]] : [])]);
    const marks = [...state.doc.checkpoints, ...state.doc.events.map(e => ({ step: e.step, bad: true }))];
    chart(box, { id: "loss", label: "loss over steps", height: 280, series, marks, format: plain, log: logLoss });
  } },
  norm: { title: "Gradient norm", draw(box) { chart(box, { id: "norm", label: "gradient norm", series: [line("gradient norm", "grad_norm")], format: plain, zero: true, robust: true }); } },
  rate: { title: "Learning rate", draw(box) { chart(box, { id: "rate", label: "learning rate", series: [line("learning rate", "learning_rate")], format: plain, zero: true }); } },
  strip: { title: "By part of the model, or by rank", wide: true, draw(box) { if (state.strip) heat(box, state.strip); else box.replaceChildren(make("p", { class: "note" }, "Nothing yet.")); } },
  speed: { title: "Speed", draw(box) {
    const reference = guess("train_tok_per_s"), speed = line("tokens/s", "tok_per_s");
    legend("speed", [["tokens a second", blue], ...predictedLegend(reference)]);
    chart(box, { id: "speed", label: "tokens a second", series: [speed], read: [speed, line("MFU", "mfu", { format: percent })], reference, format: count, zero: true });
  } },
  parts: { title: "Where a step's time goes", draw(box) {
    legend("parts", PARTS.map(([name, , color]) => [name, color]));
    const series = PARTS.map(([name, key, color]) => line(name, key, { color }));
    chart(box, { id: "parts", label: "seconds of a step by part", series, read: [...series, line("data wait", "data_wait_share", { format: percent })], stack: true, zero: true, robust: true, format: seconds });
  } },
  memory: { title: "Memory", draw(box) {
    const reference = guess("peak_memory_bytes");
    legend("memory", [["in use", blue], ["peak", "var(--soft)"], ...predictedLegend(reference)]);
    chart(box, { id: "memory", label: "memory", series: [line("in use", "memory_bytes"), line("peak", "peak_memory_bytes", { color: "var(--soft)", width: 1.4 })], reference, format: bytes, binary: true, zero: true });
  } },
  wait: { title: "Data wait", draw(box) { chart(box, { id: "wait", label: "share of a step that waits for data", series: [line("of a step", "data_wait_share")], format: percent, zero: true, robust: true }); } },
  ranks: { title: "Where the ranks' time goes", draw(box) {
    const series = RANKS.map(([name, key, color]) => line(name, key, { color }));
    if (box.closest("section").hidden = !anyOf(series)) return;
    legend("ranks", RANKS.map(([name, , color]) => [name, color]));
    chart(box, { id: "ranks", label: "seconds of a step, means over the ranks", series, stack: true, zero: true, robust: true, format: seconds });
  } },
  bursts: { title: "How evenly the first rank sends", draw(box) {
    const mean = (state.points.sent_bytes || []).map((sent, i) => sent && state.points.step_time_s[i] ? sent / state.points.step_time_s[i] : null);
    const series = WINDOWS.map(([ms, color]) => ({ name: `${ms} ms`, color, values: (state.points[`peak_sent_${ms}ms_bytes`] || []).map((peak, i) => peak != null && mean[i] ? peak / (ms / 1e3) / mean[i] : null) }));
    if (box.closest("section").hidden = !anyOf(series)) return;
    legend("bursts", WINDOWS.map(([ms, color]) => [`the busiest ${ms} ms ÷ mean`, color]));
    chart(box, { id: "bursts", label: "bytes sent in the busiest 5 and 50 ms over the mean", series, read: [...series, line("sent", "sent_bytes", { format: bytes })], zero: true, robust: true, format: x => x == null ? "–" : sig(x) + " ×" });
  } },
  held: { title: "Held out", draw(box) {
    const dots = Object.entries(state.doc.scores).map(([name, [steps, values]], i) => ({ name: name.replaceAll("_", " ").replace("heldout ", ""), steps, values, color: DOTS[i % 3] }));
    box.closest("section").hidden = !dots.length;
    legend("held", dots.map(d => [d.name, d.color]));
    chart(box, { id: "held", label: "scores on held-out text", series: [], dots, format: plain });
  } },
};
const predictedLegend = reference => reference ? [["predicted", "var(--predicted)", "line"]] : [];
function legend(id, items) {
  $("legend-" + id).replaceChildren(...items.map(([name, color, kind]) => {
    const mark = make("i", { class: kind || "", style: kind ? `border-color: ${color}` : `background: ${color}` });
    return make("span", {}, ...(color ? [mark] : []), name);
  }));
}
function build() {
  for (const [id, figure] of Object.entries(figures)) {
    const control = make("span", { class: "control" });
    if (id === "loss") {
      const slider = make("input", { type: "range", min: 0, max: .99, step: .01, value: smoothing, "aria-label": "smoothing" }), box = make("input", { type: "checkbox" });
      slider.addEventListener("input", () => { smoothing = Number(slider.value); draw(); });
      box.addEventListener("change", () => { logLoss = box.checked; draw(); });
      control.append(make("label", {}, "smoothing ", slider), make("label", {}, box, " log"));
    }
    if (id === "strip") {
      const select = make("select", { id: "strip-select", "aria-label": "what is shown by part" });
      select.addEventListener("change", () => { state.stripName = select.value; state.strip = null; poll(true); });
      control.append(select);
    }
    $("plots").append(make("section", { class: figure.wide ? "wide" : "" },
      make("div", { class: "title" }, make("h3", {}, figure.title), make("span", { class: "legend", id: "legend-" + id }), control), make("div", { id: "plot-" + id })));
  }
}
function draw() {
  if (!state.doc) return;
  for (const [id, figure] of Object.entries(figures)) figure.draw($("plot-" + id));
}

// ---- words and numbers
function stat(name, value, small) { return make("div", {}, make("dt", {}, name), make("dd", {}, value, ...(small ? [make("small", {}, small)] : []))); }
const typical = name => { const newest = (state.points[name] || []).slice(-15).filter(v => v != null).sort((a, b) => a - b); return newest.length ? newest[newest.length >> 1] : null; };
const beside = (reference, format) => reference ? `${format(reference.value)} predicted` : "";
function show() {
  const doc = state.doc, last = doc.last, run = doc.run, steps = run.steps;
  document.title = (last.step != null && steps ? `${Math.floor(100 * last.step / steps)}% ` : "") + run.name + " – Twostroke";
  $("name").textContent = run.name;
  $("status").textContent = doc.status; $("status").className = "pill " + doc.status;
  $("words").textContent = [...run.words, run.directory].join(" · ");
  $("notice").textContent = doc.sentence; $("notice").hidden = !doc.sentence || doc.status === "finished";
  $("done").style.width = steps && last.step ? 100 * last.step / steps + "%" : "0";
  $("steps").textContent = last.step == null ? "" : `step ${whole(last.step)}${steps ? ` of ${whole(steps)} · ${(100 * last.step / steps).toFixed(0)}%` : ""} · ${count(last.tokens)} tokens · epoch ${last.epoch == null ? "–" : last.epoch < .1 ? sig(last.epoch, 2) : Math.round(100 * last.epoch) / 100}`;
  const end = doc.eta_s == null ? "" : ` · ${seconds(doc.eta_s)} left, until ${new Date(Date.now() + 1000 * doc.eta_s).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" })}`;
  const ended = doc.status !== "running" && doc.status !== "starting" && doc.age_s > 90 ? ` · last step ${seconds(Math.round(doc.age_s))} ago` : "";
  $("times").textContent = last.elapsed_s == null ? "" : `${seconds(last.elapsed_s)} trained${end}${ended}`;
  $("stats").replaceChildren(
    stat("loss", plain(last.loss)), stat("gradient norm", plain(last.grad_norm)), stat("learning rate", plain(last.learning_rate)),
    stat("tokens a second", count(typical("tok_per_s")), beside(guess("train_tok_per_s"), count)), stat("MFU", percent(typical("mfu")), last.loss != null && last.mfu == null ? "machine not calibrated" : beside(guess("mfu"), percent)),
    stat("a step", seconds(typical("step_time_s")), beside(guess("step_time_s"), seconds)),
    stat("peak memory", bytes(last.peak_memory_bytes), beside(guess("peak_memory_bytes"), bytes)), stat("data wait", percent(typical("data_wait_share")), "of the step"));
  const select = $("strip-select"), names = doc.strips;
  if (names.join() !== [...select.options].map(o => o.value).join()) select.replaceChildren(...names.map(n => make("option", { value: n }, STRIPS[n] || n)));
  if (state.stripName) select.value = state.stripName;
  select.closest("section").hidden = !names.length;
  $("table-section").hidden = !doc.table.length;
  const done = doc.status === "finished";
  const predicted = Object.keys(doc.predicted).length > 0;
  $("table-section").classList.toggle("bare", !predicted);
  $("table-title").textContent = predicted ? "Predicted beside measured" : "Measured";
  $("table-note").textContent = predicted ? (done ? "From the ledger." : "Medians of the steps so far; the time is the expected total.") + " The prediction was frozen before the first step."
    : "This run has no prediction, because this machine had no profile when it began (twostroke calibrate), or because it is in another ledger.";
  $("table").replaceChildren(...doc.table.map(row => make("tr", {}, make("td", {}, row.name), make("td", {}, row.predicted), make("td", {}, row.measured), make("td", {}, row.error),
    make("td", { class: row.inside === "OUTSIDE" ? "bad" : "" }, row.inside))));
  $("events-section").hidden = !doc.events.length;
  $("events").replaceChildren(...[...doc.events].reverse().slice(0, 20).map(e => make("li", {}, `step ${whole(e.step)}, ${e.kind.replaceAll("_", " ")}: ${e.text}`)));
  $("checkpoints-section").hidden = !doc.checkpoints.length;
  $("checkpoints").textContent = doc.checkpoints.map(c => `step ${whole(c.step)} (${seconds(Math.max(1, Math.round(c.age_s)))} ago)`).join(" · ");
}
function showSamples(samples) {
  $("samples-section").hidden = !samples.length;
  $("samples").replaceChildren(...[...samples].reverse().map(s => make("div", { class: "sample" }, make("h3", {}, `step ${whole(s.step)}`),
    make("div", { class: "texts" }, ...[["likeliest", s.greedy], ["drawn", s.sampled]].map(([name, text]) =>
      make("div", {}, make("span", {}, name), make("pre", {}, make("b", {}, String(s.prompt)), String(text ?? "")))))))); 
}

// ---- asking
let failures = 0, timer = 0, asking = false;
async function poll(now) {
  clearTimeout(timer);
  if (asking || (document.hidden && !now)) { timer = setTimeout(poll, 1500); return; }
  asking = true;
  let wait = 1500;
  try {
    const strip = state.strip || {};
    const known = new URLSearchParams({ generation: state.generation, have: (state.points.step || []).length, strip: state.stripName,
      strip_generation: strip.generation || "", strip_have: (strip.steps || []).length, samples: state.samplesMark });
    const answer = await fetch("/state?" + known), doc = await answer.json();
    if (!answer.ok) throw new Error(doc.error);
    failures = 0;
    take(doc); show(); draw();
    wait = doc.more ? 30 : ["finished", "failed", "interrupted"].includes(doc.status) ? 5000 : 1500;
  } catch (error) {
    failures++;
    wait = Math.min(10000, 1500 * failures);
    const over = state.doc && state.doc.status === "finished";
    if (failures > 1 && !over) {
      $("status").textContent = "not connected"; $("status").className = "pill gone";
      $("notice").hidden = false;
      $("notice").textContent = error instanceof TypeError ? "The run's process has ended or was stopped. These are its last numbers; `twostroke watch` shows the run again." : String(error.message);
    }
  }
  asking = false;
  timer = setTimeout(poll, wait);
}
build();
poll(true);
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(true); });
let resizing = 0;
addEventListener("resize", () => { cancelAnimationFrame(resizing); resizing = requestAnimationFrame(draw); });
