// The playground of the gateway: asks its own API, and shows the answer. The conversation stays in this browser, keys do not.
"use strict";

const byId = (id) => document.getElementById(id);
const NUM_PREVIEWS = 12; // at most
const STORE = "tidewheel-playground";
const KEPT_FIELDS = ["system", "tools"]; // which the conversation goes on with
const NOTHING = { kind: "chat", asked: "", callId: "", isPlain: false, text: "", thoughts: "", calls: [], error: null, figures: {} };
let turns = []; // shown, pictures included
let tasks = {}; // "generate" or "draw", by model
let remedies = {}; // what to do, by tag of an error
let running = null; // AbortController of the open request

// --- asking ------------------------------------------------------------------------------------------------------

function headers() {
  const key = byId("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function loadModels() {
  const server = byId("server");
  try {
    const answer = await fetch("v1/models", { headers: headers() });
    const body = await answer.json();
    if (!answer.ok) {
      server.textContent = answer.status === 401 ? "This gateway wants an API key" : body.error.message;
      server.className = "bad";
      return;
    }
    const chosen = byId("model").value;
    body.data = body.data.filter((one) => one.task === "generate" || one.task === "draw");
    tasks = Object.fromEntries(body.data.map((one) => [one.id, one.task]));
    byId("model").replaceChildren(...body.data.map((one) => new Option(one.id, one.id)));
    if (body.data.some((one) => one.id === chosen)) byId("model").value = chosen;
    showFields();
    const count = body.data.length;
    server.textContent = count ? `${count} model${count > 1 ? "s" : ""} ready` : "No model is ready";
    server.className = body.data.length ? "" : "bad";
  } catch {
    server.textContent = "The gateway does not answer";
    server.className = "bad";
  }
}

/** Return the JSON of a field: null if empty, undefined if wrong, which the page says. */
function readJson(id, wanted, isRight) {
  const text = byId(id).value.trim();
  byId(`${id}-problem`).textContent = "";
  if (!text) return null;
  try {
    const value = JSON.parse(text);
    if (!isRight(value)) throw new Error("it has another form");
    return value;
  } catch (error) {
    byId(`${id}-problem`).textContent = `This is no ${wanted}: ${error.message}`;
    byId(id).focus();
    return undefined;
  }
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const readSchema = () => readJson("schema", "JSON schema", isObject);
const readTools = () => readJson("tools", "list of tools", (value) => Array.isArray(value) && value.every(isObject));
const chosenIn = (name) => document.querySelector(`input[name=${name}]:checked`).value;
const isChat = () => chosenIn("mode") === "chat";
const isPicture = () => tasks[byId("model").value] === "draw";

function pictureBody(prompt) {
  const body = { model: byId("model").value, priority: Number(byId("priority").value), stream: true, partial_images: NUM_PREVIEWS };
  const isLabel = chosenIn("drawn-from") === "label";
  body[isLabel ? "label" : "prompt"] = isLabel && Number.isInteger(Number(prompt)) ? Number(prompt) : prompt;
  for (const name of ["steps", "seed"]) if (byId(name).value) body[name] = Number(byId(name).value);
  return body;
}

/** Return the messages of a turn; none without an answer. What follows a call is its result. */
function messagesOf({ kind, asked, callId, text, calls }) {
  if (kind !== "chat" || !(text || calls.length)) return [];
  const made = calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  return [question(asked, callId), { role: "assistant", content: text, ...(made.length ? { tool_calls: made } : {}) }];
}

const question = (asked, callId) => (callId ? { role: "tool", tool_call_id: callId, content: asked } : { role: "user", content: asked });
const openCall = () => (byId("tools").value.trim() && turns.filter((turn) => messagesOf(turn.said).length).at(-1)?.said.calls[0]) || null;

function bodyOf(prompt, schema, tools) {
  const system = byId("system").value.trim();
  const before = [...(system ? [{ role: "system", content: system }] : []), ...turns.flatMap((turn) => messagesOf(turn.said))];
  const body = isChat() ? { messages: [...before, question(prompt, openCall()?.id)] } : { prompt };
  body.priority = Number(byId("priority").value);
  if (isChat() && tools?.length) Object.assign(body, { tools, parallel_tool_calls: false });
  if (byId("model").value) body.model = byId("model").value;
  if (byId("max-tokens").value) body.max_tokens = Number(byId("max-tokens").value);
  if (byId("temperature").value) body.temperature = Number(byId("temperature").value);
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (byId("stream").checked) {
    body.stream = true;
    body.stream_options = { include_usage: true, continuous_usage_stats: true };
  }
  return body;
}

/** Ask, unless a field is wrong or another answer is open; return whether it was asked. */
function ask(prompt) {
  const [schema, tools] = [readSchema(), isChat() ? readTools() : null];
  if (running || schema === undefined || tools === undefined) return false;
  const kind = isPicture() ? "picture" : isChat() ? "chat" : "prompt";
  const body = isPicture() ? pictureBody(prompt) : bodyOf(prompt, schema, tools);
  const turn = new Turn({ kind, asked: prompt, callId: (kind === "chat" && openCall()?.id) || "", isPlain: Boolean(schema) || kind !== "chat" });
  turns.push(turn);
  setRunning(new AbortController());
  answerTurn(turn, body);
  return true;
}

async function answerTurn(turn, body) {
  const path = { picture: "v1/images/generations", chat: "v1/chat/completions", prompt: "v1/completions" }[turn.said.kind];
  try {
    turn.begin();
    const answer = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal });
    turn.id = answer.headers.get("x-request-id") || "";
    if (!answer.ok) turn.fail((await answer.json()).error, answer);
    else if (body.stream) await readEvents(answer, turn);
    else turn.take(await answer.json());
  } catch (error) {
    if (error.name === "AbortError") turn.reason = "stopped by you";
    else turn.fail({ message: `The connection was lost: ${error.message}` });
  } finally {
    setRunning(null);
    turn.end();
    save();
  }
}

async function readEvents(answer, turn) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6);
      if (data === "[DONE]") return;
      const part = JSON.parse(data);
      turn.take(part);
      if (part.type === "image_generation.completed") return;
    }
  }
  if (!turn.said.error) turn.fail({ message: "The stream broke off before its end." });
}

// --- keeping -----------------------------------------------------------------------------------------------------

/** Keep the conversation for the next visit, without pictures; beyond the browser's limit, without its oldest turns. */
function save() {
  const fields = Object.fromEntries(KEPT_FIELDS.map((id) => [id, byId(id).value]));
  let kept = turns.map((turn) => turn.said).filter((said) => said.kind !== "picture");
  for (; kept.length; kept = kept.slice(Math.ceil(kept.length / 4))) {
    try {
      return localStorage.setItem(STORE, JSON.stringify({ turns: kept, fields }));
    } catch {
      continue;
    }
  }
  forget();
}

function forget() {
  try {
    localStorage.removeItem(STORE);
  } catch {
    // The browser lets the page keep nothing.
  }
}

function restore() {
  try {
    const kept = JSON.parse(localStorage.getItem(STORE) || "{}");
    for (const id of KEPT_FIELDS) byId(id).value = kept.fields?.[id] || "";
    for (const said of kept.turns || []) {
      const turn = new Turn(said);
      turns.push(turn);
      turn.show();
    }
  } catch {
    clear();
  }
}

function clear() {
  for (const turn of turns) turn.node.remove();
  turns = [];
  byId("empty").hidden = false;
  forget();
}

// --- showing -----------------------------------------------------------------------------------------------------

class Turn {
  constructor(said) {
    this.said = { ...structuredClone(NOTHING), ...said }; // kept
    this.node = byId("turn").content.cloneNode(true).firstElementChild;
    this.find(".asked").textContent = this.said.asked;
    this.find(".asked").classList.toggle("result", Boolean(this.said.callId));
    this.find(".answer").classList.toggle("plain", this.said.isPlain);
    this.find(".answer").classList.toggle("mono", this.said.isPlain && this.said.kind === "chat");
    this.find(".copy").addEventListener("click", () => this.copy());
    this.find(".again").addEventListener("click", () => this.askAgain());
    byId("empty").hidden = true;
    byId("turns").append(this.node);
    this.started = this.firstAt = this.lastAt = 0;
    this.id = "";
    this.reason = "";
    this.usage = null;
    this.picture = null; // an element
    this.frame = 0; // in which the text will be shown
  }

  find(selector) {
    return this.node.querySelector(selector);
  }

  begin() {
    this.find(".answer").classList.add("open");
    this.find(".text").setAttribute("aria-busy", "true"); // read out at the end, not by token
    this.started = performance.now();
    scrollToEnd();
  }

  take(part) {
    if (part.error) return this.fail(part.error);
    if (part.b64_json) return this.takePicture(part);
    if (part.usage) this.usage = part.usage;
    for (const choice of part.choices || []) this.takeChoice(choice);
  }

  noteTime() {
    this.lastAt = performance.now();
    this.firstAt = this.firstAt || this.lastAt;
  }

  takePicture(part) {
    this.noteTime();
    if (!this.picture) {
      const picture = document.createElement("img");
      picture.addEventListener("load", () => {
        picture.classList.toggle("tiny", picture.naturalWidth < 160);
        scrollToEnd();
      }, { once: true });
      this.find(".text").after(picture);
      this.picture = picture;
    }
    this.picture.src = `data:image/png;base64,${part.b64_json}`;
    this.picture.alt = this.reason = `step ${part.step} of ${part.steps}`;
  }

  takeChoice(choice) {
    const given = choice.delta || choice.message || { content: choice.text };
    if (given.content || given.reasoning_content || given.tool_calls) this.noteTime();
    this.said.thoughts += given.reasoning_content || "";
    this.said.text += given.content || "";
    (given.tool_calls || []).forEach((part, position) => this.takeCall(part, part.index ?? position));
    if (choice.finish_reason) this.reason = choice.stop_reason ? `${choice.finish_reason} (${choice.stop_reason})` : choice.finish_reason;
    this.frame = this.frame || requestAnimationFrame(() => this.show());
  }

  takeCall(part, number) {
    const call = (this.said.calls[number] ??= { id: "", name: "", arguments: "" });
    call.id = call.id || part.id || "";
    call.name += part.function?.name || "";
    call.arguments += part.function?.arguments || "";
  }

  /** Show what is said so far. */
  show() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { text, thoughts, calls, error, figures, isPlain } = this.said;
    const pane = byId("turns");
    const isAtEnd = pane.scrollHeight - pane.scrollTop - pane.clientHeight < 80;
    this.find(".thoughts").hidden = !thoughts;
    this.find(".thoughts pre").textContent = thoughts;
    if (isPlain) this.find(".text").textContent = text;
    else showMarkdown(this.find(".text"), text);
    while (this.find(".calls").children.length < calls.length) {
      this.find(".calls").append(Object.assign(element("details", element("summary"), element("pre")), { open: true }));
    }
    calls.forEach((call, number) => this.showCall(this.find(".calls").children[number], call));
    this.find(".copy").hidden = !text;
    if (error) this.showError(error);
    const rows = Object.entries(figures).map(([name, value]) => element("div", element("dt", name), element("dd", value)));
    this.find(".figures").replaceChildren(...rows);
    if (isAtEnd) scrollToEnd();
  }

  showCall(node, call) {
    let shown = call.arguments;
    try {
      shown = JSON.stringify(JSON.parse(shown), null, 2);
    } catch {
      // Not whole yet, or cut.
    }
    node.firstElementChild.textContent = `Call of ${call.name}`;
    node.lastElementChild.textContent = shown;
  }

  showError({ tag, message, remedy }) {
    this.find(".error").hidden = false;
    this.find(".tag").textContent = tag;
    this.find(".message").textContent = message;
    this.find(".remedy").textContent = remedy;
  }

  fail(error, answer) {
    const retry = answer?.headers.get("retry-after-ms");
    const tag = error.tag || error.code || "no answer";
    const remedy = [remedies[tag], retry ? `Retry after ${retry} ms.` : ""].filter(Boolean).join(" ");
    this.said.error = { tag, message: error.message, remedy };
    this.reason = "error";
  }

  end() {
    const { text, calls, error } = this.said;
    this.said.figures = this.figures();
    this.find(".answer").classList.remove("open");
    this.show();
    if (!text && !calls.length && !this.picture && !error) this.find(".text").textContent = "(no text)";
    this.find(".text").setAttribute("aria-busy", "false");
    scrollToEnd();
    showFields();
  }

  figures() {
    const isStreamed = this.picture || byId("stream").checked;
    const seconds = (from, to) => (from && to ? `${((to - from) / 1000).toFixed(2)} s` : null);
    const count = this.usage?.completion_tokens;
    const after = (this.lastAt - this.firstAt) / 1000;
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    const rows = {
      [this.picture ? "first picture" : "first token"]: isStreamed ? seconds(this.started, this.firstAt) : null,
      "tokens/s": isStreamed && count > 1 && after > 0 ? ((count - 1) / after).toFixed(1) : null,
      "in all": seconds(this.started, this.lastAt),
      "tokens in": this.usage ? `${this.usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}` : null,
      "tokens out": this.usage ? String(count) : null,
      finish: this.reason || null,
      request: this.id || null,
    };
    return Object.fromEntries(Object.entries(rows).filter(([, value]) => value !== null));
  }

  async copy() {
    const button = this.find(".copy");
    try {
      await navigator.clipboard.writeText(this.said.text);
      button.textContent = "Copied";
    } catch { // pages of plain http on another host have no clipboard
      getSelection().selectAllChildren(this.find(".text"));
      button.textContent = "Press Ctrl-C";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  }

  /** Ask the last question again, with the settings of now. */
  askAgain() {
    if (running) return;
    turns.pop();
    if (ask(this.said.asked)) this.node.remove();
    else turns.push(this);
  }
}

function scrollToEnd() {
  byId("turns").scrollTop = byId("turns").scrollHeight;
}

function setRunning(controller) {
  const isLost = document.activeElement === byId("stop"); // which is about to hide
  running = controller;
  byId("talk").classList.toggle("busy", Boolean(controller));
  byId("stop").hidden = !controller;
  byId("send").hidden = Boolean(controller);
  byId("clear").disabled = Boolean(controller);
  if (isLost) byId("prompt").focus();
}

// --- the page ----------------------------------------------------------------------------------------------------

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = byId("prompt").value;
  if (prompt.trim() && ask(prompt)) byId("prompt").value = "";
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  clear();
  showFields();
  byId("prompt").focus();
});
byId("key").addEventListener("change", loadModels);
byId("schema").addEventListener("change", readSchema);
byId("tools").addEventListener("change", readTools);
addEventListener("pagehide", () => { if (running) save(); });
function showFields() {
  const isDrawn = isPicture();
  for (const part of document.querySelectorAll(".of-texts")) part.hidden = isDrawn;
  document.querySelector(".of-pictures").hidden = !isDrawn;
  byId("chat-fields").hidden = !isChat();
  const call = openCall();
  const ofText = !isChat() ? "Text that the model continues" : call ? `Result of ${call.name}` : "Message";
  const ofPicture = chosenIn("drawn-from") === "label" ? "Number of the label" : "What the picture shows";
  byId("prompt").placeholder = isDrawn ? ofPicture : ofText;
}
for (const id of ["mode", "model", "drawn-from", "tools"]) byId(id).addEventListener("change", showFields);
document.querySelector("#settings form").addEventListener("submit", (event) => event.preventDefault());
byId("settings").open = !matchMedia("(max-width: 760px)").matches;
fetch("playground/errors.json").then(async (answer) => { remedies = answer.ok ? await answer.json() : {}; });
restore();
scrollToEnd();
showFields();
byId("prompt").focus();
loadModels();
