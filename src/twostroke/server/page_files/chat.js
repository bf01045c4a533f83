// The page of a server: a conversation with one of its models, or with two side by side.
import { $, Tokens, button, copyButton, draw, hideTip, make, watchTokens } from "./answer.js";
import { refresh, seconds } from "./panel.js";
import { ServerError, ask, events, hasKey, setKey } from "./requests.js";

const state = { turns: [], models: [], running: null, ready: null };
const ALTERNATIVES = 5;
const ENDS = { length: "cut at the token limit", timeout: "out of time", error: "failed", abort: "ended by the server" };

const mode = () => $("mode").value;
const named = () => [$("model").value, $("beside").value].filter(Boolean);
const say = sentence => { $("said").textContent = sentence; };
function complain(sentence) {
  $("composer-error").textContent = sentence;
  $("composer-error").hidden = !sentence;
}

// ---- models and the state of the server
async function loadModels() {
  const found = (await (await ask("v1/models")).json()).data, first = !state.models.length;
  const changed = found.map(m => m.id).join("\n") !== state.models.map(m => m.id).join("\n"); // else an open list would close
  state.models = found;
  if (changed) for (const [id, none] of [["model", []], ["beside", [["", "nothing"]]]]) {
    const select = $(id), chosen = select.value;
    select.replaceChildren(...[...none, ...found.map(m => [m.id, m.id])].map(([value, text]) => make("option", { value }, text)));
    if ([...select.options].some(option => option.value === chosen)) select.value = chosen;
  }
  if (first && found[0]?.chat_template === false) {
    $("mode").value = "completion";
    suggestLength();
  }
  showMode();
}

// Adapters may have been loaded since, and models have come and gone.
const reloadModels = () => loadModels().catch(error => { if (!(error instanceof ServerError)) throw error; });

// Completions end after 16 tokens where nothing is set: OpenAI's default, and little to read.
function suggestLength() {
  const most = document.querySelector("[data-field=max_tokens]");
  if (mode() === "completion" && most.value === "") most.value = "128";
}

function showMode() {
  const model = state.models.find(m => m.id === $("model").value), isChat = mode() === "chat";
  const context = model?.max_model_len ? ` Its context is ${model.max_model_len.toLocaleString("en")} tokens.` : "";
  const template = model?.chat_template !== false ? ""
    : isChat ? " It comes without a chat template, so a conversation is written as lines “User: …” and “Assistant: …”."
      : " It comes without a chat template, so it is not made for conversations.";
  $("empty").textContent = model ? `${model.id} ${isChat ? "answers messages" : "continues the text that you give it"}.${context}${template}` : "";
  $("text-label").textContent = $("text").placeholder = isChat ? "Message" : "Text to continue";
  $("send").textContent = isChat ? "Send" : "Continue";
  document.querySelectorAll(".chat-only").forEach(node => { node.hidden = !isChat; });
  document.querySelector("[data-field=max_tokens]").placeholder = isChat ? "all that fit" : "16";
}

function showState(word) {
  $("status").textContent = word;
  $("status").className = `pill ${{ "not connected": "gone", "key needed": "gone" }[word] || word}`;
}

function askKey() {
  showState("key needed");
  $("figures-note").textContent = "The server shows its figures to those who have a key.";
  $("forget-key").hidden = true;
  if (!$("key-form").hidden) return;
  $("key-form").hidden = false;
  $("key-error").hidden = !hasKey();
  $("key-error").textContent = hasKey() ? "The server does not accept this key." : "";
  $("key").focus();
}

let timer = 0;
async function poll() {
  clearTimeout(timer);
  let wait = 2000;
  try {
    if (!document.hidden) {
      const ready = await refresh();
      if (ready !== state.ready || !state.models.length) await loadModels();
      state.ready = ready;
      showState(ready ? "ready" : "loading");
      $("forget-key").hidden = !hasKey();
    }
    if (state.running) wait = 500;
  } catch (error) {
    if (error.status === 401) { askKey(); return; }
    showState("not connected");
    $("figures-note").textContent = `The server does not answer.${$("figures").children.length ? " These figures are the last that came." : ""}`;
    state.ready = null;
    if (!(error instanceof ServerError)) throw error;
  }
  timer = setTimeout(poll, wait);
}

// ---- a request's fields
function fields() {
  const found = {};
  for (const input of document.querySelectorAll("[data-field]")) {
    const text = input.type === "text" ? input.value : input.value.trim();
    if (input.validity.badInput) throw new ServerError(`${input.labels[0].textContent.trim()} is not a number.`);
    if (text !== "") found[input.dataset.field] = input.type === "text" ? text : Number(text);
  }
  return found;
}

function messages(turn, column) {
  const system = $("system").value.trim(), list = system ? [{ role: "system", content: $("system").value }] : [];
  for (const earlier of state.turns.slice(0, state.turns.indexOf(turn))) {
    const answer = earlier.answers[column] || earlier.answers[0];
    // Of a turn without an answer nothing is sent: templates expect user and assistant by turns.
    if (earlier.mode === "chat" && answer.text) list.push({ role: "user", content: earlier.text }, { role: "assistant", content: answer.text });
  }
  return [...list, { role: "user", content: turn.text }];
}

function body(turn, answer, column) {
  const common = { model: answer.model, stream: true, stream_options: { include_usage: true }, ...fields() }, wanted = $("logprobs").checked;
  if (turn.mode === "chat") return { ...common, messages: messages(turn, column), ...(wanted ? { logprobs: true, top_logprobs: ALTERNATIVES } : {}) };
  return { ...common, prompt: turn.text, ...(wanted ? { logprobs: ALTERNATIVES } : {}) };
}

// ---- answers
const blank = model => ({ model, text: "", reasoning: "", tokens: new Tokens(), finish: "", error: "", first: 0, began: 0, ended: 0, n: 0, drawing: false });

async function fill(turn, answer, column, signal) {
  answer.began = performance.now();
  try {
    for await (const event of events(turn.mode === "chat" ? "v1/chat/completions" : "v1/completions", body(turn, answer, column), signal)) {
      if (event.usage) answer.n = event.usage.completion_tokens;
      const choice = event.choices[0];
      if (!choice) continue;
      const piece = turn.mode === "chat" ? choice.delta.content || "" : choice.text;
      const reasoning = turn.mode === "chat" && choice.delta.reasoning_content || "";
      answer.reasoning += reasoning;
      if ((piece || reasoning) && !answer.first) answer.first = performance.now();
      answer.text += piece;
      answer.tokens.add(choice);
      if (choice.finish_reason) answer.finish = choice.finish_reason;
      soon(turn, answer);
    }
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else if (error instanceof ServerError) {
      answer.error = error.message;
      if (error.status === 401) askKey();
    } else {
      answer.error = `The page failed on this answer: ${error.message}`;
      console.error(error);
    }
  }
  answer.ended = performance.now();
  showAnswer(turn, answer);
}

// A frame of the screen draws once, however many tokens came for it.
function soon(turn, answer) {
  if (answer.drawing) return;
  answer.drawing = true;
  requestAnimationFrame(() => { answer.drawing = false; if (!answer.ended) showAnswer(turn, answer); });
}

function numbers(answer) {
  const parts = [], n = answer.n || answer.tokens.list.length;
  if (n) parts.push(`${n} token${n === 1 ? "" : "s"}`);
  if (answer.first) {
    parts.push(`first after ${seconds((answer.first - answer.began) / 1e3)}`);
    if (n > 1) parts.push(`${seconds((answer.ended - answer.first) / 1e3 / (n - 1))} each next`);
  }
  if (answer.finish === "stopped") parts.push("stopped");
  if (ENDS[answer.finish]) parts.push(ENDS[answer.finish]);
  return parts.join(" · ");
}

function showAnswer(turn, answer) {
  const stays = innerHeight + scrollY >= document.documentElement.scrollHeight - 80, { node, box, foot } = answer;
  answer.tokens.place(answer.text, answer.ended > 0);
  answer.thought.hidden = !answer.reasoning;
  answer.thought.lastChild.textContent = answer.reasoning;
  draw(box, answer.text, answer.tokens, turn.mode === "chat");
  node.classList.toggle("busy", !answer.ended);
  if (answer.ended) {
    const tools = [];
    if (answer.text) tools.push(...copyButton(() => answer.text));
    if (answer.text && turn.mode !== "chat") tools.push(button("Put into the text", () => {
      $("text").value = turn.text + answer.text;
      $("text").focus();
    }));
    foot.replaceChildren(...(answer.error ? [make("p", { class: "error", role: "alert" }, answer.error)] : []),
      make("div", { class: "row" }, make("p", { class: "note" }, numbers(answer)), ...tools));
  }
  else foot.replaceChildren();
  if (stays) toEnd();
}

const toEnd = () => scrollTo(0, document.documentElement.scrollHeight);

function answerNode(turn, answer) {
  answer.box = make("div", { class: "text", tabindex: 0, role: "group", "aria-label": `Answer of ${answer.model}. The left and right arrows walk its tokens.` });
  answer.thought = make("details", { class: "reasoning", hidden: "" }, make("summary", {}, "Reasoning"), make("p", {}));
  const model = state.models.find(each => each.id === answer.model), loads = model?.state && model.state !== "loaded";
  answer.foot = make("div", { class: "foot" }, ...(loads ? [make("p", { class: "note" }, "The model is loaded first.")] : []));
  answer.node = make("div", { class: "answer busy" }, make("h2", {}, answer.model), answer.thought, answer.box, answer.foot);
  watchTokens(answer.box, () => answer.tokens);
  return answer.node;
}

// ---- turns
function fresh(turn) {
  turn.answers = named().map(blank);
  turn.list.className = turn.answers.length > 1 ? "answers two" : "answers";
  turn.list.replaceChildren(...turn.answers.map(answer => answerNode(turn, answer)));
}

function showAsked(turn) {
  turn.asked.replaceChildren(make("p", {}, turn.text), make("div", { class: "row" }, button("Edit", () => edit(turn), { class: "small edit" }),
    button("Regenerate", () => again(turn), { class: "small regenerate" })));
}

async function run(turn) {
  const stop = new AbortController();
  state.running = stop;
  fresh(turn);
  showRunning();
  toEnd(); // not to the turn's end: that would lie behind the composer
  say("Answering.");
  poll();
  await Promise.all(turn.answers.map((answer, column) => fill(turn, answer, column, stop.signal)));
  if (state.running !== stop) return; // cleared meanwhile
  state.running = null;
  showRunning();
  reloadModels();
  say(turn.answers.map(answer => answer.error || `${answer.model} answered: ${numbers(answer)}.`).join(" "));
}

function showRunning() {
  const running = state.running !== null;
  $("send").disabled = running;
  $("stop").hidden = !running;
  $("clear").hidden = !state.turns.length;
  $("empty").hidden = state.turns.length > 0;
  $("turns").setAttribute("aria-busy", running);
  document.querySelectorAll(".edit, .regenerate").forEach(node => { node.disabled = running; });
}

// False, with a sentence, if `text` cannot be sent now.
function sendable(text) {
  const why = state.running ? "An answer is being written. Esc stops it."
    : !text.trim() ? (mode() === "chat" ? "The message is empty." : "There is no text to continue.")
      : !named().length ? "The server's models are not known yet." : "";
  complain(why);
  return !why;
}

function send(text) {
  if (!sendable(text)) return false;
  const turn = { text, mode: mode(), answers: [], asked: make("div", { class: "asked" }), list: make("div") };
  turn.node = make("article", { class: "turn" }, turn.asked, turn.list);
  showAsked(turn);
  state.turns.push(turn);
  $("turns").append(turn.node);
  run(turn);
  return true;
}

// Answer `turn` anew. What came after it followed from its old answer, and goes.
function again(turn) {
  if (state.running) return;
  complain("");
  for (const later of state.turns.splice(state.turns.indexOf(turn) + 1)) later.node.remove();
  turn.mode = mode();
  run(turn);
  $("text").focus();
}

function edit(turn) {
  const text = make("textarea", { rows: 3, "aria-label": "Message, to be sent anew" });
  text.value = turn.text;
  const done = () => { showAsked(turn); $("text").focus(); };
  const submit = () => {
    if (!sendable(text.value)) return;
    turn.text = text.value;
    showAsked(turn);
    again(turn);
  };
  enterSends(text, submit);
  text.addEventListener("keydown", event => { if (event.key === "Escape") { event.stopPropagation(); done(); } });
  const later = state.turns.length - 1 - state.turns.indexOf(turn);
  turn.asked.replaceChildren(text, make("div", { class: "row" }, button("Send anew", submit, { class: "primary" }), button("Cancel", done),
    ...(later ? [make("span", { class: "note" }, `What follows (${later} message${later === 1 ? "" : "s"}) will be removed.`)] : [])));
  text.focus();
}

function clear() {
  state.running?.abort();
  state.running = null;
  for (const turn of state.turns.splice(0)) turn.node.remove();
  hideTip();
  complain("");
  showRunning();
  say("The conversation is cleared.");
  $("text").focus();
}

// ---- keys and buttons
function enterSends(area, submit) {
  area.addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
}

function submit() {
  if (send($("text").value)) $("text").value = "";
  $("text").focus();
}

enterSends($("text"), submit);
$("text").addEventListener("input", () => complain(""));
// What the keyboard walks to is scrolled above the composer, which covers the end of the page and grows with its text.
new ResizeObserver(() => { document.documentElement.style.scrollPaddingBottom = `${$("composer").offsetHeight}px`; }).observe($("composer"));
$("composer").addEventListener("submit", event => { event.preventDefault(); submit(); });
$("stop").addEventListener("click", () => { state.running?.abort(); $("text").focus(); });
$("clear").addEventListener("click", clear);
document.addEventListener("keydown", event => {
  if (event.key !== "Escape") return;
  hideTip();
  state.running?.abort();
});
for (const kind of ["wheel", "touchmove", "pointerdown"]) document.addEventListener(kind, hideTip, { passive: true });
document.addEventListener("visibilitychange", () => { if (!document.hidden && $("key-form").hidden) poll(); });
$("model").addEventListener("change", showMode);
$("mode").addEventListener("change", () => { suggestLength(); showMode(); });
for (const id of ["model", "beside"]) $(id).addEventListener("focus", reloadModels);
$("shade").addEventListener("change", () => document.body.classList.toggle("shaded", $("shade").checked));
$("key-form").addEventListener("submit", event => {
  event.preventDefault();
  const why = $("key").value ? setKey($("key").value) : "The key is empty.";
  $("key-error").textContent = why;
  $("key-error").hidden = !why;
  if (why) return;
  $("key").value = "";
  $("key-form").hidden = true;
  $("text").focus();
  poll();
});
$("forget-key").addEventListener("click", () => { setKey(""); askKey(); clearTimeout(timer); });
if (matchMedia("(max-width: 860px)").matches) for (const id of ["server", "settings"]) $(id).open = false;
showMode();
$("text").focus();
poll();
