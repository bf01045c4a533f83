// Draws an answer. Whatever a model wrote becomes text nodes, never HTML.
export const $ = id => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) name === "class" ? node.className = value : node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function button(name, act, attributes = {}) {
  const node = make("button", { type: "button", class: "small", ...attributes }, name);
  node.addEventListener("click", act);
  return node;
}

// Browsers give a page the clipboard on localhost and over https only.
export function copyButton(text) {
  if (!navigator.clipboard) return [];
  const node = button("Copy", async () => {
    await navigator.clipboard.writeText(text());
    node.textContent = "Copied";
    setTimeout(() => { node.textContent = "Copy"; }, 1200);
  });
  return [node];
}

// ---- tokens: which part of the text each one is
const escaped = text => /^bytes:(\\x[0-9a-f]{2})+$/.test(text);
const bytesOf = text => escaped(text)
  ? Uint8Array.from(text.match(/[0-9a-f]{2}(?=\\|$)/g), pair => parseInt(pair, 16)) : new TextEncoder().encode(text);

// One form for the log-probabilities of chats and of completions.
function entries(choice) {
  const of = choice.logprobs;
  if (!of) return [];
  if (of.content) return of.content.map(e => ({ shown: e.token, bytes: Uint8Array.from(e.bytes), logprob: e.logprob,
    top: e.top_logprobs.map(t => [t.token, t.logprob]) }));
  return of.tokens.map((token, i) => ({ shown: token, bytes: bytesOf(token), logprob: of.token_logprobs[i],
    top: Object.entries(of.top_logprobs[i] || {}) }));
}

export class Tokens {
  list = [];
  at = 0; // characters of the text whose tokens are known
  #next = 0;
  #decoder = new TextDecoder();

  add(choice) {
    for (const entry of entries(choice)) this.list.push({ ...entry, start: -1, end: -1, text: this.#decoder.decode(entry.bytes, { stream: true }) });
  }

  // Find in `text` the tokens that came. Text may lag behind tokens, and special tokens have none.
  place(text, ended) {
    for (; this.#next < this.list.length; this.#next++) {
      const token = this.list[this.#next], left = text.slice(this.at, this.at + token.text.length);
      let length = 0;
      if (left === token.text) length = left.length;
      else if (!ended && left.length < token.text.length && token.text.startsWith(left)) return;
      else if (this.at === 0 && token.text.trimStart() && text.startsWith(token.text.trimStart())) length = token.text.trimStart().length;
      token.start = this.at;
      this.at = token.end = this.at + length;
    }
  }

  // Index of the first token that ends behind `start`.
  after(start) {
    let low = 0, high = this.#next;
    while (low < high) { const middle = (low + high) >> 1; if (this.list[middle].end > start) high = middle; else low = middle + 1; }
    return low;
  }

  get placed() { return this.#next; }
}

const share = logprob => Math.exp(logprob);
const shade = logprob => { const p = share(logprob); return p >= .5 ? 0 : p >= .2 ? 1 : p >= .05 ? 2 : p >= .01 ? 3 : 4; };

// Append text[start:end] to `parent`, a span for each token.
function append(parent, text, start, end, tokens) {
  let at = start;
  for (let i = tokens.after(start); i < tokens.placed && at < end; i++) {
    const token = tokens.list[i];
    if (token.start >= end) break;
    if (token.start > at) parent.append(text.slice(at, token.start));
    const from = Math.max(at, token.start), to = Math.min(token.end, end);
    if (to > from) parent.append(make("span", { class: `t t${shade(token.logprob)}`, "data-i": i }, text.slice(from, to)));
    at = Math.max(from, to);
  }
  if (at < end) parent.append(text.slice(at, end));
}

// ---- blocks: paragraphs, and code between fences. Other Markdown stays as it was written.
export function blocks(text) {
  const found = [];
  let code = null, paragraph = -1, at = 0;
  const flush = end => { if (paragraph >= 0) found.push({ kind: "text", start: paragraph, end }); paragraph = -1; };
  for (const line of text.split("\n")) {
    const end = at + line.length, fence = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/.exec(line);
    if (code) {
      if (fence && !fence[2].trim() && fence[1].startsWith(code.fence)) {
        found.push({ kind: "code", name: code.name, start: code.start, end: Math.max(code.start, at - 1) });
        code = null;
      }
    } else if (fence) {
      flush(at - 1);
      code = { fence: fence[1], name: fence[2].trim().slice(0, 40), start: Math.min(end + 1, text.length) };
    } else if (!line.trim()) flush(at - 1);
    else if (paragraph < 0) paragraph = at;
    at = end + 1;
  }
  if (code) found.push({ kind: "code", name: code.name, start: code.start, end: text.length });
  flush(text.length);
  return found;
}

function drawn(block, text, tokens) {
  if (block.kind === "code") {
    const code = make("code");
    append(code, text, block.start, block.end, tokens);
    const written = text.slice(block.start, block.end);
    return make("div", { class: "code" }, make("div", { class: "row" }, make("span", {}, block.name || "code"), ...copyButton(() => written)),
      make("pre", { tabindex: 0 }, code));
  }
  const node = make("p", block.kind === "whole" ? { class: "whole" } : {});
  if (block.kind === "whole") { append(node, text, block.start, block.end, tokens); return node; }
  let at = block.start;
  for (const match of text.slice(block.start, block.end).matchAll(/`([^`\n]+)`/g)) {
    const begin = block.start + match.index, code = make("code");
    append(node, text, at, begin, tokens);
    append(code, text, begin + 1, begin + match[0].length - 1, tokens);
    node.append(code);
    at = begin + match[0].length;
  }
  append(node, text, at, block.end, tokens);
  return node;
}

// Bring `box` up to date with `text`. Blocks that did not change stay, so a long answer costs no more than its last one.
export function draw(box, text, tokens, asMarkdown) {
  const wanted = asMarkdown ? blocks(text) : [{ kind: "whole", start: 0, end: text.length }];
  wanted.forEach((block, i) => {
    const mark = [block.kind, block.start, block.end, Math.min(tokens.at, block.end)].join(" "), old = box.children[i];
    if (old && old.dataset.mark === mark) return;
    const node = drawn(block, text, tokens);
    node.dataset.mark = mark;
    old ? old.replaceWith(node) : box.append(node);
  });
  while (box.children.length > wanted.length) box.lastChild.remove();
}

// ---- what is known of one token, beside it
const printed = text => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(no text)";
const signed = x => x.toFixed(3).replace("-", "−");
const percent = p => p >= .9995 ? "100%" : p >= .0995 ? `${(100 * p).toFixed(1)}%` : p >= 1e-4 ? `${(100 * p).toPrecision(2)}%` : "<0.01%";

export function hideTip() {
  $("tip").hidden = true;
  document.querySelectorAll(".t.current").forEach(node => node.classList.remove("current"));
}

function showTip(span, tokens) {
  hideTip();
  const token = tokens.list[Number(span.dataset.i)], tip = $("tip");
  span.classList.add("current");
  const row = (shown, logprob) => make("tr", shown === token.shown ? { class: "chosen" } : {}, make("td", {}, printed(shown)),
    make("td", {}, percent(share(logprob))), make("td", {}, signed(logprob)));
  tip.replaceChildren(make("p", {}, make("code", {}, printed(token.shown)), ` had ${percent(share(token.logprob))}, ln p = ${signed(token.logprob)}`),
    make("table", {}, make("tbody", {}, ...token.top.map(each => row(...each)))));
  tip.hidden = false;
  const box = span.getClientRects()[0] || span.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  const below = box.bottom + 6;
  tip.style.top = `${below + tip.offsetHeight < innerHeight ? below : Math.max(4, box.top - tip.offsetHeight - 6)}px`;
}

// Tokens of `box` are shown under the pointer, by a click or a touch, and by the arrow keys while the box has the focus.
export function watchTokens(box, tokens) {
  // The click as well: a finger's "pointerover" comes before its "pointerdown", which hides what is shown.
  for (const kind of ["pointerover", "click"]) box.addEventListener(kind, event => {
    const span = event.target.closest(".t");
    if (span) showTip(span, tokens());
  });
  box.addEventListener("pointerleave", event => { if (event.pointerType !== "touch") hideTip(); }); // a finger leaves when it is lifted
  box.addEventListener("blur", hideTip);
  box.addEventListener("keydown", event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], spans = [...box.querySelectorAll(".t")];
    if (!step || event.target !== box || !spans.length) return;
    event.preventDefault();
    const now = spans.findIndex(span => span.classList.contains("current"));
    const next = spans[now < 0 ? (step > 0 ? 0 : spans.length - 1) : Math.max(0, Math.min(spans.length - 1, now + step))];
    next.scrollIntoView({ block: "nearest" });
    showTip(next, tokens());
  });
}
