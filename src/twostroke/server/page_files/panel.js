// The live panel: figures of /metrics, and what was predicted of them.
import { $, make } from "./answer.js";
import { ask } from "./requests.js";

const KEPT = 60; // samples of the curve

// Series of Prometheus' text format by name, each a list of [labels, value].
export function parse(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries([...(match[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(each => each.slice(1)));
    (found[match[1]] ||= []).push([labels, Number(match[3])]);
  }
  return found;
}

const figures = x => String(Number(x.toPrecision(3)));
export const seconds = x => x == null ? "–" : x === 0 ? "0 s" : x < 1e-3 ? `${figures(1e6 * x)} µs` : x < 1 ? `${figures(1e3 * x)} ms` : `${figures(x)} s`;
const count = x => x >= 1e6 ? `${figures(x / 1e6)}M` : x >= 1e4 ? `${figures(x / 1e3)}k` : figures(x);

const speeds = [];
let last = null;

function stat(name, value, small = "", kind = "") {
  return make("div", {}, make("dt", {}, name), make("dd", {}, value, ...(small ? [make("small", { class: kind }, small)] : [])));
}

function show(series) {
  const one = name => series[`twostroke_${name}`]?.[0][1] ?? 0;
  const mean = name => one(`${name}_seconds_count`) ? one(`${name}_seconds_sum`) / one(`${name}_seconds_count`) : null;
  const predicted = Object.fromEntries((series.twostroke_predicted_seconds || []).map(([labels, value]) => [labels.latency, value]));
  const now = { at: performance.now(), tokens: one("engine_output_tokens") };
  if (last && now.at > last.at) speeds.push(Math.max(0, now.tokens - last.tokens) / (now.at - last.at) * 1e3); // an engine that restarts counts anew
  speeds.splice(0, speeds.length - KEPT);
  last = now;
  const speed = speeds.at(-1) ?? 0, most = Math.max(...speeds, 0);
  const beside = name => predicted[name] == null ? [] : [`${seconds(predicted[name])} predicted`, "predicted"];
  $("figures").replaceChildren(
    stat("running", count(one("requests_running")), one("requests_running") === 1 ? "request" : "requests"),
    stat("waiting", count(one("requests_waiting")), one("requests_waiting") === 1 ? "request" : "requests"),
    stat("KV cache", one("kv_pages") ? `${(100 * one("kv_pages_used") / one("kv_pages")).toFixed(0)}%` : "–", `${count(one("kv_pages_cached"))} ${one("kv_pages_cached") === 1 ? "page" : "pages"} kept for prefixes`),
    stat("tokens a second", count(speed), `${count(most)} at the peak`),
    stat("first token", seconds(mean("ttft")), ...beside("ttft")),
    stat("each next one", seconds(mean("tpot")), ...beside("tpot")));
  $("speed").hidden = false;
  $("speed").querySelector("polyline").setAttribute("points",
    speeds.map((value, i) => `${(120 - 2 * (speeds.length - 1 - i)).toFixed(1)},${(23 - 22 * value / (most || 1)).toFixed(1)}`).join(" "));
  const shape = series.twostroke_predicted_seconds?.[0][0];
  $("figures-note").textContent = "Latencies are means of all answers so far. " + (shape
    ? `Predicted before the start, for one request at a time of ${shape.prompt_tokens} + ${shape.output_tokens} tokens.`
    : "There is no prediction: the server's machine has no profile, which “twostroke calibrate” makes.");
  return one("ready") === 1;
}

// Show the figures now. Whether the engine is ready. Raises ServerError.
export async function refresh() {
  return show(parse(await (await ask("metrics")).text()));
}
