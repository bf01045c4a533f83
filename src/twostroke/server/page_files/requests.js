// Requests to the server: the key, streams of events, and every failure as a sentence.
const STORED = "twostroke-key";

let key = "";
try { key = sessionStorage.getItem(STORED) || ""; } catch { /* storage is blocked: a key lasts as long as the page */ }

export const hasKey = () => key !== "";

// Why `text` cannot be a key, or "" once it is kept. An empty text forgets the key.
export function setKey(text) {
  if (/[^\x21-\x7e]/.test(text)) return "A key has printable ASCII characters and no space.";
  key = text;
  try {
    if (text) sessionStorage.setItem(STORED, text); else sessionStorage.removeItem(STORED);
  } catch { /* as above */ }
  return "";
}

// Its message is a sentence for people. `status` is 0 where no answer came.
export class ServerError extends Error {
  constructor(sentence, status = 0) { super(sentence); this.status = status; }
}

function asSentence(text) {
  const words = String(text).trim();
  return words[0].toUpperCase() + words.slice(1) + (/[.?!]$/.test(words) ? "" : ".");
}

async function refusal(answer) {
  let text = "";
  try { text = (await answer.json()).error.message; } catch { /* no JSON: a proxy's own page */ }
  const sentence = asSentence(text || `the server answered with status ${answer.status}.`);
  const wait = Number(answer.headers.get("retry-after"));
  return new ServerError(answer.status === 429 && wait ? `${sentence} A place may be free in ${wait} s.` : sentence, answer.status);
}

export async function ask(path, body, signal) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body) headers["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method: body ? "POST" : "GET", body: body && JSON.stringify(body), headers, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. It has stopped, or the network is down.");
  }
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

// The events of a stream, as objects. Leaving the loop closes the connection, upon which the server drops the request.
export async function* events(path, body, signal) {
  const answer = await ask(path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ServerError("The server ended in the middle of this answer.");
      const pieces = (rest + value).split("\n\n");
      rest = pieces.pop();
      for (const piece of pieces) {
        if (!piece.startsWith("data: ")) continue;
        if (piece === "data: [DONE]") return;
        const message = JSON.parse(piece.slice(6));
        if (message.error) throw new ServerError(asSentence(message.error.message || "the server failed on this request."));
        yield message;
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new ServerError("The connection to the server was lost in the middle of this answer.");
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
}
