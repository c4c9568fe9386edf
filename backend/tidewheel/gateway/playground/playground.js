// The playground of the gateway: asks its own API, and shows the answer as text alone. Nothing is stored.
"use strict";

const byId = (id) => document.getElementById(id);
const history = []; // messages of the chat, without the system message
const NUM_PREVIEWS = 12; // at most
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

function readSchema() {
  const text = byId("schema").value.trim();
  byId("schema-problem").textContent = "";
  if (!text) return null;
  try {
    const schema = JSON.parse(text);
    if (schema === null || typeof schema !== "object" || Array.isArray(schema)) throw new Error("it is no object");
    return schema;
  } catch (error) {
    byId("schema-problem").textContent = `This is no JSON schema: ${error.message}`;
    byId("schema").focus();
    return undefined;
  }
}

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

function bodyOf(prompt, schema) {
  const system = byId("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...history, { role: "user", content: prompt }];
  const body = { ...(isChat() ? { messages } : { prompt }), priority: Number(byId("priority").value) };
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

async function ask(prompt, schema) {
  const turn = new Turn(prompt, Boolean(schema));
  const path = isPicture() ? "v1/images/generations" : isChat() ? "v1/chat/completions" : "v1/completions";
  const body = isPicture() ? pictureBody(prompt) : bodyOf(prompt, schema);
  setRunning(new AbortController());
  try {
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
  }
  if (body.messages && turn.text) history.push({ role: "user", content: prompt }, { role: "assistant", content: turn.text });
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
  if (!turn.hasFailed) turn.fail({ message: "The stream broke off before its end." });
}

// --- showing -----------------------------------------------------------------------------------------------------

class Turn {
  constructor(prompt, isJson) {
    byId("empty")?.remove();
    this.node = byId("turn").content.cloneNode(true).firstElementChild;
    this.find(".asked").textContent = prompt;
    this.find(".answer").classList.add("open");
    this.find(".answer").classList.toggle("mono", isJson);
    byId("turns").append(this.node);
    scrollToEnd();
    this.started = performance.now();
    this.firstAt = this.lastAt = 0;
    this.text = "";
    this.id = "";
    this.reason = "";
    this.usage = null;
    this.picture = null; // an element
    this.hasFailed = false;
  }

  find(selector) {
    return this.node.querySelector(selector);
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
    const said = choice.delta || choice.message || { content: choice.text };
    if (said.content || said.reasoning_content || said.tool_calls) this.noteTime();
    const pane = byId("turns");
    const isAtEnd = pane.scrollHeight - pane.scrollTop - pane.clientHeight < 80;
    if (said.reasoning_content) {
      this.find(".thoughts").hidden = false;
      this.find(".thoughts pre").append(said.reasoning_content);
    }
    const text = (said.content || "") + (said.tool_calls ? JSON.stringify(said.tool_calls, null, 2) : "");
    if (text) {
      this.text += text;
      this.find(".text").append(text);
    }
    if (choice.finish_reason) this.reason = choice.stop_reason ? `${choice.finish_reason} (${choice.stop_reason})` : choice.finish_reason;
    if (isAtEnd) scrollToEnd();
  }

  fail(error, answer) {
    this.hasFailed = true;
    const retry = answer?.headers.get("retry-after-ms");
    const tag = error.tag || error.code || "no answer";
    this.find(".error").hidden = false;
    this.find(".tag").textContent = tag;
    this.find(".message").textContent = error.message;
    this.find(".remedy").textContent = [remedies[tag], retry ? `Retry after ${retry} ms.` : ""].filter(Boolean).join(" ");
    this.reason = "error";
  }

  end() {
    this.find(".answer").classList.remove("open");
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
    for (const [name, value] of Object.entries(rows)) {
      if (value === null) continue;
      const row = document.createElement("div");
      row.append(Object.assign(document.createElement("dt"), { textContent: name }));
      row.append(Object.assign(document.createElement("dd"), { textContent: value }));
      this.find(".figures").append(row);
    }
    if (this.find(".text").textContent === "" && !this.picture && !this.hasFailed) this.find(".text").textContent = "(no text)";
    scrollToEnd();
  }
}

function scrollToEnd() {
  byId("turns").scrollTop = byId("turns").scrollHeight;
}

function setRunning(controller) {
  running = controller;
  byId("stop").hidden = !controller;
  byId("send").hidden = Boolean(controller);
  byId("clear").disabled = Boolean(controller);
}

// --- the page ----------------------------------------------------------------------------------------------------

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = byId("prompt").value;
  const schema = readSchema();
  if (running || !prompt.trim() || schema === undefined) return;
  byId("prompt").value = "";
  ask(prompt, schema);
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  history.length = 0;
  byId("turns").replaceChildren();
  byId("prompt").focus();
});
byId("key").addEventListener("change", loadModels);
byId("schema").addEventListener("change", readSchema);
function showFields() {
  const isDrawn = isPicture();
  for (const part of document.querySelectorAll(".of-texts")) part.hidden = isDrawn;
  document.querySelector(".of-pictures").hidden = !isDrawn;
  byId("system-field").hidden = !isChat();
  const ofText = isChat() ? "Message" : "Text that the model continues";
  const ofPicture = chosenIn("drawn-from") === "label" ? "Number of the label" : "What the picture shows";
  byId("prompt").placeholder = isDrawn ? ofPicture : ofText;
}
for (const id of ["mode", "model", "drawn-from"]) byId(id).addEventListener("change", showFields);
document.querySelector("#settings form").addEventListener("submit", (event) => event.preventDefault());
byId("settings").open = !matchMedia("(max-width: 760px)").matches;
fetch("playground/errors.json").then(async (answer) => { remedies = answer.ok ? await answer.json() : {}; });
loadModels();
