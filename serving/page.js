"use strict";
const $ = (id) => document.getElementById(id);
const show = (id, on) => { $(id).hidden = !on; };
const SUDOKUS = { 16: "1..4\n....\n....\n4..1", 36: "1....6\n......\n..3...\n...4..\n......\n6....1",
  81: "53..7....\n6..195...\n.98....6.\n8...6...3\n4..8.3..1\n7...2...6\n.6....28.\n...419..5\n....8..79" };
const TURNS = { chat: [], text: [] };  // what each tab shows: {role, content, given, note}
let model = null, mode = "", running = null, boards = null, timer = 0;

function headers() {
  const key = sessionStorage.getItem("key");
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function api(path, body, signal) {
  const how = body ? { method: "POST", body: JSON.stringify(body), signal } : {};
  const answer = await fetch(path, { headers: headers(), ...how });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => null);
  const error = new Error(said?.error?.message ?? `the server answered with status ${answer.status}`);
  error.status = answer.status;
  throw error;
}

const textTokens = () => Math.min(128, model.max_model_len - 1);  // of a continuation, unless another number is typed

// An answer of the server; if no number was typed, of as many tokens as fit behind the prompt.
async function answerTo(path, how, signal) {
  const body = mode === "text" && !how.max_tokens ? { ...how, max_tokens: textTokens() } : how;
  try {
    return await api(path, body, signal);
  } catch (error) {
    const room = /use max_tokens of at most (\d+)/.exec(error.message);
    if (how.max_tokens || !room) throw error;
    return api(path, { ...body, max_tokens: Number(room[1]) }, signal);
  }
}

async function connect() {
  try {
    model = (await (await api("/v1/models")).json()).data[0];
  } catch (error) {
    const locked = error.status === 401;
    show("key", locked || Boolean(sessionStorage.getItem("key")));
    $("about").textContent = locked && !sessionStorage.getItem("key") ? "" : error.message;
    return;
  }
  show("key", false);
  document.title = `${model.id} · Torus`;
  const can = (ability) => model.abilities.includes(ability);
  if (can("puzzles")) {
    $("about").textContent = `${model.id} solves puzzles of ${model.max_model_len} cells.`;
    $("puzzle").value = SUDOKUS[model.max_model_len] ?? "";
    $("puzzle").rows = Math.min(30, Math.ceil(Math.sqrt(model.max_model_len)) + 1);
    show("puzzles", true);
    return;
  }
  $("about").textContent = `${model.id}, up to ${model.max_model_len.toLocaleString("en")} tokens` +
    (can("chat") ? "" : ". It was not trained on conversations; it continues texts.");
  show("tabs", can("chat"));
  show("panel", true);
  choose(can("chat") ? "chat" : "text");
}

function choose(name) {
  if (running) running.abort();
  mode = name;
  for (const other of ["chat", "text"]) $(`tab-${other}`).setAttribute("aria-selected", String(other === name));
  $("ask-label").textContent = name === "chat" ? "Message (Enter sends, Shift+Enter begins a line)" : "Text to continue";
  $("send").textContent = name === "chat" ? "Send" : "Continue";
  show("system-label", name === "chat");
  $("max_tokens").placeholder = name === "chat" ? "as many as fit" : String(textTokens());
  show("error", false);
  $("count").textContent = "";
  $("log").replaceChildren(...TURNS[name].map(draw));
  $("input").focus();
}

function element(name, kind, text) {
  const made = document.createElement(name);
  made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
}

function draw(turn) {
  const box = element("div", `turn ${turn.role}`), who = element("div", "who");
  who.append(element("span", "", turn.role === "user" ? "You" : model.id));
  if (turn.role !== "user") {
    const copy = element("button", "", "Copy");
    copy.type = "button";
    copy.onclick = async () => {
      if (navigator.clipboard) await navigator.clipboard.writeText((turn.given ?? "") + turn.content);
      else getSelection().selectAllChildren(turn.text);  // a page over plain HTTP may not copy
      copy.textContent = navigator.clipboard ? "Copied" : "Selected";
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    };
    who.append(copy);
  }
  turn.box = box;
  turn.text = element("div", "text");
  if (turn.given) turn.text.append(element("span", "given", turn.given));
  turn.span = element("span", "", turn.content);
  turn.text.append(turn.span);
  turn.noted = element("div", "note", turn.note ?? "");
  box.append(who, turn.text, turn.noted);
  return box;
}

function add(turn) {
  TURNS[mode].push(turn);
  $("log").append(draw(turn));
  turn.box.scrollIntoView({ block: "end" });
  return turn;
}

function sampling() {
  const how = {};
  for (const name of ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"])
    if ($(name).value !== "") how[name] = Number($(name).value);
  if ($("stop_at").value) how.stop = [$("stop_at").value];
  return how;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server ended the answer early");
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function ask(event) {
  event.preventDefault();
  const text = $("input").value, chats = mode === "chat";
  if (running || (chats && !text.trim())) return;
  show("error", false);
  const how = { model: model.id, stream: true, stream_options: { include_usage: true }, ...sampling() };
  let path = "/v1/completions", turn;
  if (chats) {
    add({ role: "user", content: text });
    path = "/v1/chat/completions";
    const system = $("system").value.trim();
    how.messages = [...(system ? [{ role: "system", content: system }] : []),
      ...TURNS.chat.map(({ role, content }) => ({ role, content }))];
    $("input").value = "";
  } else {
    how.prompt = text;
  }
  turn = add({ role: "assistant", content: "", given: chats ? "" : text });
  turn.box.classList.add("busy");
  running = new AbortController();
  busy(true);
  try {
    await receive(await answerTo(path, how, running.signal), turn);
  } catch (error) {
    if (error.name === "AbortError") turn.note = "stopped";
    else failed(error, turn, text);
  } finally {
    running = null;
    busy(false);
    turn.box.classList.remove("busy");
    turn.noted.textContent = turn.note ?? "";
  }
}

async function receive(answer, turn) {
  for await (const part of events(answer)) {
    if (part.error) throw new Error(part.error.message);
    const choice = part.choices[0];
    if (choice) {
      turn.content += choice.delta?.content ?? choice.text ?? "";
      turn.span.textContent = turn.content;
      if (choice.finish_reason === "length") turn.note = "ended at the limit of tokens";
      if (innerHeight + scrollY > document.body.scrollHeight - 120) turn.box.scrollIntoView({ block: "nearest" });
    }
    if (part.usage) $("count").textContent = `${part.usage.prompt_tokens} tokens in, ${part.usage.completion_tokens} out`;
  }
}

function failed(error, turn, text) {
  $("error").textContent = error.message;
  show("error", true);
  if (turn.content) return;
  turn.box.remove();
  TURNS[mode].pop();
  if (mode === "chat") {  // the message was not answered
    TURNS.chat.pop().box.remove();
    $("input").value = text;
  }
}

function busy(on) {
  $("send").disabled = on;
  show("stop", on);
}

async function solve(event) {
  event.preventDefault();
  show("puzzle-error", false);
  clearInterval(timer);
  const steps = $("steps").value ? { supervision_steps: Number($("steps").value) } : {};
  try {
    boards = await (await api("/v1/puzzles", { model: model.id, puzzle: $("puzzle").value, ...steps })).json();
  } catch (error) {
    $("puzzle-error").textContent = error.message;
    show("puzzle-error", true);
    return;
  }
  show("solution", true);
  $("at").max = boards.steps.length;
  $("verdict").textContent = `After ${boards.steps.length} steps: ${boards.verdict}.`;
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) step(boards.steps.length);
  else play();
}

function play() {
  clearInterval(timer);
  step(0);
  timer = setInterval(() => {
    step(Number($("at").value) + 1);
    if (Number($("at").value) >= boards.steps.length) clearInterval(timer);
  }, 400);
}

function step(number) {
  $("at").value = number;
  const rows = number ? boards.steps[number - 1].rows : boards.given;
  const before = number > 1 ? boards.steps[number - 2].rows : boards.given;
  const wrong = new Set(number ? boards.steps[number - 1].wrong.map(String) : []);
  const board = $("board");
  let changed = 0;
  board.className = boards.kind;
  board.style.gridTemplateColumns = `repeat(${rows[0].length}, auto)`;
  board.style.setProperty("--columns", rows[0].length);
  board.setAttribute("aria-label", rows.join("\n"));
  board.replaceChildren(...rows.flatMap((row, y) => [...row].map((letter, x) => {
    const differs = letter !== before[y][x];
    changed += differs;
    const kinds = boards.kind === "maze" ? mazeKinds(letter) : sudokuKinds(letter, y, x, row.length);
    if (differs) kinds.push("changed");
    if (wrong.has(`${y},${x}`)) kinds.push("wrong");
    return element("i", kinds.join(" "), "#o .".includes(letter) ? "" : letter);
  })));
  const cells = (count) => `${count} ${count === 1 ? "cell" : "cells"}`;
  const found = wrong.size ? `, ${cells(wrong.size)} wrong` : "";
  $("caption").textContent = number ? `Step ${number} of ${boards.steps.length}: ${cells(changed)} changed${found}; ` +
    `probability of halting ${boards.steps[number - 1].halt.toFixed(3)}` : "The puzzle";
}

function mazeKinds(letter) {
  return [{ "#": "wall", o: "path", S: "start", G: "goal" }[letter] ?? "floor"];
}

function sudokuKinds(letter, y, x, side) {
  const [height, width] = boards.box, kinds = [boards.given[y][x] === "." ? "answer" : "given"];
  if (x === side - 1) kinds.push("last"); else if (x % width === width - 1) kinds.push("right");
  if (y === side - 1) kinds.push("low"); else if (y % height === height - 1) kinds.push("bottom");
  return kinds;
}

$("key").onsubmit = (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("secret").value);
  connect();
};
$("ask").onsubmit = ask;
$("stop").onclick = () => running?.abort();
$("clear").onclick = () => {
  running?.abort();
  TURNS[mode].length = 0;
  $("log").replaceChildren();
  $("count").textContent = "";
  show("error", false);
};
$("input").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && mode === "chat") ask(event);
};
for (const name of ["chat", "text"]) $(`tab-${name}`).onclick = () => choose(name);
$("solve").onsubmit = solve;
$("play").onclick = play;
$("at").oninput = () => { clearInterval(timer); step(Number($("at").value)); };
connect();
