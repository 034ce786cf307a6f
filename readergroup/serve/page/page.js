"use strict";
// Every name that the store holds reaches the page as text, never as markup.

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const NOTICES = 200;
const WINDOWS = [60, 120, 300, 900];
const CURVE = 120;
const TURNS = 10;
const FAR_SECONDS = "10000000";

let session = null;
let source = null;
let chosen = null;
/** What is known of the end of the chosen group: nothing, "still listed" or "gone". */
let deleted = "";
/** The newest document of the chosen group. */
let known = null;
const colours = new Map();

// ---------------------------------------------------------------- elements

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  for (const child of children) made.append(typeof child === "string" ? document.createTextNode(child) : child);
  return made;
}

function drawing(tag, attributes = {}, title = null) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (title !== null) {
    const text = document.createElementNS(SVG, "title");
    text.textContent = title;
    made.append(text);
  }
  return made;
}

function say(id, text, shown = true) {
  const found = byId(id);
  if (found.textContent !== text) found.textContent = text;
  found.hidden = !shown;
}

/**
 * Update the rows of a table in place, so that the focus and the place of a screen reader stay where they are. Rows far
 * from what is seen take turns, so that a long table costs little more than what is seen of it.
 */
function fill(table, items, keyOf, make, update) {
  const body = byId(table).tBodies[0];
  const keys = new Set(items.map(keyOf));
  const old = new Map();
  for (const row of [...body.rows]) {
    if (keys.has(row.dataset.key)) old.set(row.dataset.key, row);
    else { // now, so that the rows behind it need not move
      nearby.unobserve(row);
      row.remove();
    }
  }
  let before = body.firstElementChild;
  body.turn = ((body.turn ?? 0) + 1) % TURNS;
  items.forEach((item, index) => {
    const isNew = !old.has(keyOf(item));
    const row = isNew ? make(item) : old.get(keyOf(item));
    if (isNew) {
      row.dataset.key = keyOf(item);
      label(table, row);
      nearby.observe(row);
    }
    if (row === before) before = before.nextElementSibling;
    else body.insertBefore(row, before);
    Object.assign(row, { item, show: update });
    if (isNew || !row.isFar || index % TURNS === body.turn) update(row, item);
  });
}

/** Name the cells of a row after their columns, and keep their roles, where a narrow page shows the row as a card. */
function label(table, row) {
  const titles = byId(table).tHead.rows[0].cells;
  row.setAttribute("role", "row");
  for (const cell of row.cells) {
    cell.setAttribute("role", cell.tagName === "TH" ? "rowheader" : "cell");
    cell.dataset.title = titles[cell.cellIndex].textContent;
  }
}

const nearby = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting && target.isFar) target.show(target, target.item);
    target.isFar = !isIntersecting;
  }
}, { rootMargin: "100%" });

function cells(row, ...texts) {
  texts.forEach((text, index) => {
    if (text !== null) write(row.cells[index], text);
  });
}

/** Change the text of an element that holds nothing else. A text that stays costs no layout. */
function write(found, text) {
  if (!found.firstChild) found.append(document.createTextNode(text));
  else if (found.firstChild.data !== text) found.firstChild.data = text;
}

function rowOf(...classes) {
  const row = element("tr", {}, element("th", { scope: "row" }));
  for (const name of classes) row.append(element("td", name ? { class: name } : {}));
  return row;
}

// ---------------------------------------------------------------- numbers

const whole = new Intl.NumberFormat("en");
const one = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

function size(bytes) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) { bytes /= 1000; unit += 1; }
  return `${unit ? one.format(bytes) : whole.format(bytes)} ${units[unit]}`;
}

const count = (number, unit) => `${whole.format(number)} ${unit}${number === 1 ? "" : "s"}`;

// ---------------------------------------------------------------- the server

async function ask(path, options = {}) {
  const answer = await fetch(path, { credentials: "same-origin", cache: "no-store", ...options });
  if (answer.status === 401 && path !== "login") showLogin();
  const document = answer.headers.get("content-type")?.startsWith("application/json") ? await answer.json() : {};
  if (!answer.ok) throw new Error(document.error ?? `the server answered ${answer.status}`);
  return document;
}

const change = (group, name, body) => send(`groups/${encodeURIComponent(group)}/${name}`, body);

function send(path, body) {
  return ask(path, {
    method: "POST",
    headers: { "content-type": "application/json", "x-readergroup-csrf": session.csrf },
    body: JSON.stringify(body),
  });
}

function showLogin() {
  source?.close();
  byId("view").hidden = true;
  byId("login").hidden = false;
  byId("logout").hidden = true;
  status("log in to see the store", "");
  byId("token").focus();
}

function status(text, kind) {
  const found = byId("status");
  if (found.textContent !== text) found.textContent = text;
  found.className = kind;
}

async function begin() {
  try {
    session = await ask("session");
  } catch (error) {
    if (byId("login").hidden) {
      status(`no connection: ${error.message}`, "lost");
      setTimeout(begin, 2000);
    }
    return;
  }
  byId("login").hidden = true;
  byId("view").hidden = false;
  byId("logout").hidden = !session.login;
  byId("store").textContent = session.store;
  for (const each of document.querySelectorAll(".writes")) each.hidden = !session.writes;
  byId("group-actions").hidden = !session.writes;
  follow();
}

/** Open the live view of the group in the address. */
function follow() {
  const name = new URLSearchParams(location.hash.slice(1)).get("group");
  if (name !== chosen) forget(name);
  listen(name);
}

/** Open the live view of a group, or of the list alone. */
function listen(name) {
  source?.close();
  deleted = "";
  const opened = new EventSource(name === null ? "events" : `events?group=${encodeURIComponent(name)}`);
  source = opened;
  opened.onopen = () => status("live", "live");
  opened.addEventListener("overview", (event) => showOverview(JSON.parse(event.data)));
  opened.addEventListener("group", (event) => showGroup(JSON.parse(event.data)));
  opened.addEventListener("changes", (event) => showGroup(changed(known, JSON.parse(event.data))));
  opened.addEventListener("notice", (event) => showNotice(JSON.parse(event.data)));
  opened.addEventListener("gone", () => {
    listen(null);
    deleted = "still listed";
    say("group-error", "This group was deleted.");
  });
  opened.onerror = async () => {
    status("the connection is lost; trying again", "lost");
    if (opened.readyState !== EventSource.CLOSED || opened !== source) return;
    try { // the browser does not say why it gave up
      await ask(name === null ? "session" : `groups/${encodeURIComponent(name)}`);
    } catch (error) {
      if (!byId("login").hidden) return;
      if (name !== null) { byId("group").hidden = false; say("group-error", error.message); }
    }
    setTimeout(() => { if (opened === source) listen(name); }, 3000);
  };
}

function forget(name) {
  chosen = name;
  colours.clear();
  byId("group").hidden = true;
  byId("choose").hidden = name !== null;
  byId("notices").replaceChildren();
  byId("pictures").replaceChildren();
  pictures.clear();
  for (const table of ["segments", "readers", "checkpoints"]) byId(table).tBodies[0].replaceChildren();
  say("group-error", "", false);
  if (name !== null) byId("group-title").textContent = name;
  markChosen();
}

// ---------------------------------------------------------------- all groups

function showOverview(found) {
  const error = found.error ? `the store cannot be read: ${found.error}` : "live";
  status(error, found.error ? "lost" : "live");
  byId("groups-empty").hidden = found.groups.length > 0;
  fill("groups", found.groups, (each) => each.group, (each) => {
    const row = rowOf("number", "number wide", "number wide", "number wide");
    row.cells[0].append(element("a", { href: `#group=${encodeURIComponent(each.group)}` }, each.group));
    return row;
  }, (row, each) => cells(row, null, whole.format(each.lag.events), one.format(each.lag.seconds),
    whole.format(each.number_of_readers), whole.format(each.number_of_segments)));
  say("groups-more", `and ${count(found.groups_left_out, "more group")}`, found.groups_left_out > 0);
  const unreadable = byId("groups-unreadable");
  unreadable.hidden = found.unreadable.length === 0;
  unreadable.replaceChildren(...found.unreadable.map((each) => element("li", {}, `${each.group} cannot be read: ${each.error}`)));
  showLetterStreams(found.dead_letters);
  byId("states-section").hidden = found.states.length === 0;
  fill("states", found.states, (each) => each.name, (each) => {
    const row = rowOf("number");
    row.cells[0].append(each.has_updates ? button(each.name, () => openState(each.name)) : each.name);
    return row;
  }, (row, each) => cells(row, null, size(each.bytes)));
  if (state !== null) loadState();
  say("states-more", `and ${count(found.states_left_out, "more state")}`, found.states_left_out > 0);
  markChosen();
  const isListed = found.groups.some((each) => each.group === chosen);
  if (deleted && !isListed) deleted = "gone";
  if (deleted === "gone" && isListed) follow(); // it was created again
  if (chosen === null && found.groups.length === 1) location.hash = `#group=${encodeURIComponent(found.groups[0].group)}`;
}

function markChosen() {
  for (const row of byId("groups").tBodies[0].rows) {
    if (row.dataset.key === chosen) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
  document.title = chosen === null ? "readergroup" : `${chosen} – readergroup`;
}

// ---------------------------------------------------------------- one group

function showGroup(found) {
  if (found.group !== chosen) return;
  known = found;
  byId("group").hidden = false;
  const state = found.end_of_data ? "it has read its streams to their end" :
    `${count(found.lag.events, "event")} behind (${size(found.lag.bytes)}, ${one.format(found.lag.seconds)} s)`;
  const wanted = found.wanted_readers === null ? "" : `, ${whole.format(found.wanted_readers)} wanted`;
  say("summary", `reads ${found.streams.join(", ")} with ${count(found.number_of_readers, "reader")}${wanted}; ${state}${retries(found)}`);
  say("group-error", found.error ? `The store cannot be read; this is what was last seen: ${found.error}` : "",
    Boolean(found.error));
  showPictures(found);
  showSegments(found);
  showReaders(found);
  byId("checkpoints-empty").hidden = found.checkpoints.length > 0;
  byId("checkpoints").hidden = !found.checkpoints.length;
  fill("checkpoints", found.checkpoints, (each) => String(each.number), (each) => {
    const row = rowOf("", ...(session.writes ? ["change"] : []));
    if (session.writes) row.cells[2].append(button("Reset to it", () => confirmReset(each.name, true)));
    return row;
  }, (row, each) => cells(row, each.name, each.is));
}

function retries({ at, retries: { waiting, is_partial: isPartial, next_at: next } }) {
  if (!waiting) return "";
  const events = `${count(waiting, "event")}${isPartial ? " or more" : ""}`;
  return `; ${events} ${waiting === 1 ? "waits" : "wait"} for a retry, the next in ${whole.format(Math.max(0, Math.round(next - at)))} s`;
}

const KEYS = { segments: "segment", readers: "reader", checkpoints: "number", spans: "span" };

/** Return the document after the changes that the server has sent. */
function changed(before, changes) {
  const after = { ...before, ...changes };
  for (const [name, key] of Object.entries(KEYS)) {
    if (!Array.isArray(changes[name])) after[name] = withChanges(before[name], key, changes[name]);
  }
  const points = Math.max(0, after.points - before.points);
  const old = new Map(before.segments.map((row) => [row.segment, row.curve]));
  for (const row of after.segments) {
    if (row.curve !== old.get(row.segment)) continue; // the whole curve came
    if (row.curve.length) row.curve = [...row.curve, ...(row.added ?? Array(points).fill(row.curve.at(-1)))].slice(-CURVE);
    delete row.added;
  }
  return after;
}

/** Return copies of the rows. Those that stay keep their order, and each new one comes with its index. */
function withChanges(before, key, { gone = [], changed = [], added = [] } = {}) {
  const left = new Set(gone);
  const fields = new Map(changed.map((each) => [each[key], each]));
  const after = before.filter((row) => !left.has(row[key])).map((row) => ({ ...row, ...fields.get(row[key]) }));
  for (const [index, row] of added) after.splice(index, 0, row);
  return after;
}

function showSegments(found) {
  byId("segments").classList.toggle("weighed", found.is_weighed);
  const next = new Map(found.segments.map((each) => [`${streamOf(each)} ${each.low}`, each]));
  fill("segments", found.segments, (each) => each.segment, () => {
    const row = rowOf("", "", "number", "number", "number", "number load", "wide", ...(session.writes ? ["change"] : []));
    row.cells[7].append(curve());
    return row;
  }, (row, each) => {
    cells(row, each.segment, each.owner ?? "–", each.is, whole.format(each.events), size(each.bytes), one.format(each.seconds), whole.format(each.load));
    bend(row.cells[7].firstElementChild, each.curve);
    if (session.writes) offerScaling(row.cells[8], each, next.get(`${streamOf(each)} ${each.high}`));
  });
  say("segments-more", `and ${count(found.segments_left_out, "segment")} that are less behind`, found.segments_left_out > 0);
}

function showReaders(found) {
  byId("readers-empty").hidden = found.readers.length > 0;
  byId("readers").hidden = !found.readers.length;
  fill("readers", found.readers, (each) => each.reader, (each) => {
    const row = rowOf("number", "number", ...(session.writes ? ["change"] : []));
    if (session.writes) row.cells[3].append(button("Remove", () => confirmRemoval(each.reader)));
    return row;
  }, (row, each) => {
    const lease = each.lease_seconds === null ? "no lease" :
      `${one.format(each.lease_seconds)} s ago${each.expired ? ", expired" : ""}`;
    cells(row, each.reader, whole.format(each.segments), lease);
    row.cells[2].classList.toggle("bad", Boolean(each.expired));
  });
  say("readers-more", `and ${count(found.readers_left_out, "more reader")}`, found.readers_left_out > 0);
}

function curve() {
  const made = drawing("svg", { class: "curve", viewBox: "0 0 119 24", preserveAspectRatio: "none", "aria-hidden": "true" });
  made.append(drawing("polyline"));
  return made;
}

function bend(found, values) {
  const most = Math.max(1, ...values);
  const first = CURVE - values.length;
  const points = values.map((value, index) => `${first + index},${(22 - 20 * value / most).toFixed(1)}`).join(" ");
  if (found.dataset.points === points) return;
  found.dataset.points = points;
  found.firstElementChild.setAttribute("points", points);
}

// ---------------------------------------------------------------- the picture

function colour(owner) {
  if (!colours.has(owner)) {
    const used = new Set(colours.values());
    const free = [0, 1, 2, 3, 4, 5, 6, 7].find((each) => !used.has(each));
    colours.set(owner, free ?? colours.size % 8);
  }
  return `c${colours.get(owner)}`;
}

/** The drawings by stream. Rectangles stay; only the window on them moves with the time. */
const pictures = new Map();

function showPictures(found) {
  const now = found.at;
  const first = Math.min(now, ...found.spans.map((span) => span.start));
  const width = WINDOWS.find((seconds) => now - first <= seconds) ?? WINDOWS[WINDOWS.length - 1];
  const shown = found.spans.filter((span) => span.end === null || span.end > now - width);
  const streams = [...new Set(shown.map((span) => span.stream))].sort();
  const owners = [...new Set(shown.map((span) => span.owner).filter((owner) => owner))];
  for (const owner of colours.keys()) if (!owners.includes(owner)) colours.delete(owner);
  for (const stream of pictures.keys()) if (!streams.includes(stream)) pictures.delete(stream);
  const figures = streams.map((stream) => {
    if (!pictures.has(stream)) pictures.set(stream, picture(stream, now));
    return draw(pictures.get(stream), shown.filter((span) => span.stream === stream), now, width);
  });
  if (!figures.length && found.number_of_segments) {
    figures.push(element("p", { class: "empty" }, "There are too many segments for a picture."));
  }
  const present = [...byId("pictures").children];
  if (figures.length !== present.length || figures.some((figure, index) => figure !== present[index])) {
    byId("pictures").replaceChildren(...figures);
  }
  const items = owners.map((owner) => [`span ${colour(owner)}`, owner]);
  if (shown.some((span) => span.owner === "")) items.push(["span idle", "no owner"]);
  if (shown.some((span) => span.owner === null)) items.push(["span waiting", "waits for its predecessors"]);
  const meaning = JSON.stringify(items);
  if (byId("legend").dataset.meaning === meaning) return;
  byId("legend").dataset.meaning = meaning;
  byId("legend").replaceChildren(...items.map(([kind, text]) => legend(kind, text)));
}

function picture(stream, origin) {
  const made = drawing("svg", { class: "picture", preserveAspectRatio: "none", role: "img" });
  const layers = [drawing("g"), drawing("g")]; // those that wait are on top
  made.append(...layers);
  const since = element("span");
  const axis = element("div", { class: "axis", "aria-hidden": "true" }, since, element("span", {}, "now"));
  const figure = element("figure", {}, element("figcaption", {}, `${stream}: keys from 0 (bottom) to 1 (top)`), made, axis);
  return { stream, origin, figure, made, layers, since, rectangles: new Map() };
}

function draw(drawn, spans, now, width) {
  const { stream, origin, figure, made, layers, since, rectangles } = drawn;
  const lasting = spans.filter((span) => span.end === null).length;
  set(made, "aria-label", `${stream}: ${count(lasting, "segment")} now, the last ${width / 60} minutes. The table below has the same.`);
  set(made, "viewBox", `${(now - width - origin).toFixed(2)} 0 ${width} 200`);
  write(since, width === 60 ? "1 minute ago" : `${width / 60} minutes ago`);
  const old = new Map(rectangles);
  for (const span of spans) {
    let rectangle = rectangles.get(span.span);
    old.delete(span.span);
    if (!rectangle) {
      const owner = span.owner === null ? "waits for its predecessors" : span.owner || "no owner";
      rectangle = drawing("rect", {
        x: (span.start - origin).toFixed(2), y: (200 * (1 - span.high)).toFixed(2), height: (200 * (span.high - span.low)).toFixed(2),
      }, `${span.segment}, keys ${span.low} to ${span.high}: ${owner}`);
      rectangles.set(span.span, rectangle);
      layers[span.owner === null ? 1 : 0].append(rectangle);
    }
    const kind = span.owner === null ? "waiting" : span.owner === "" ? "idle" : colour(span.owner);
    set(rectangle, "class", `span ${kind}`);
    // One that lasts ends far right of what is seen.
    set(rectangle, "width", span.end === null ? FAR_SECONDS : Math.max(width / 2000, span.end - span.start).toFixed(2));
  }
  for (const [key, rectangle] of old) {
    rectangles.delete(key);
    rectangle.remove();
  }
  return figure;
}

function set(found, name, value) {
  if (found.getAttribute(name) !== value) found.setAttribute(name, value);
}

function legend(kind, text) {
  const box = drawing("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" });
  box.append(drawing("rect", { class: kind, x: "1", y: "1", width: "8", height: "8" }));
  return element("li", {}, box, text);
}

// ---------------------------------------------------------------- notices

function showNotice(notice) {
  const list = byId("notices");
  const at = new Date(1000 * notice.at);
  list.prepend(element("li", {}, element("time", { datetime: at.toISOString() }, clock.format(at)), notice.text));
  while (list.children.length > NOTICES) list.lastElementChild.remove();
}

// ---------------------------------------------------------------- dead letters

const stamp = new Intl.DateTimeFormat("en-GB", { dateStyle: "short", timeStyle: "medium" });
/** The page of dead letters that is shown: its stream, what it selects, and what the overview said of it. */
let letters = null;

function showLetterStreams(streams) {
  byId("letters-section").hidden = streams.length === 0 && letters === null;
  fill("letter-streams", streams, (each) => each.stream, (each) => {
    const row = rowOf("number");
    row.cells[0].append(button(each.stream, () => openLetters(each.stream)));
    return row;
  }, (row, each) => cells(row, null, `${whole.format(each.pending)}${each.is_partial ? " or more" : ""}`));
  const found = letters && streams.find((each) => each.stream === letters.stream);
  if (!found || found.pending === letters.pending) return;
  const isFirst = letters.pending === null;
  letters.pending = found.pending;
  if (!isFirst && letters.older === null) loadLetters();
}

function openLetters(stream) {
  letters = { stream, status: "pending", error: "", key: "", older: null, next: null, pending: null };
  for (const [id, value] of [["status", "pending"], ["error", ""], ["key", ""]]) byId(`letters-${id}`).value = value;
  byId("letters").tBodies[0].replaceChildren();
  say("letters-of", `Dead letters in ${stream}`);
  byId("letters-page").hidden = false;
  byId("letters-of").focus();
  loadLetters();
}

async function loadLetters() {
  const asked = letters;
  const wanted = new URLSearchParams({ stream: asked.stream, status: asked.status });
  for (const name of ["error", "key", "older"]) if (asked[name]) wanted.set(name, asked[name]);
  try {
    const found = await ask(`dead-letters?${wanted}`);
    if (asked !== letters) return;
    say("letters-failed", "", false);
    showLetters(found);
  } catch (error) {
    if (asked === letters) say("letters-failed", error.message);
  }
}

function showLetters(found) {
  letters.next = found.older;
  byId("letters-older").disabled = found.older === null;
  byId("letters-newest").disabled = letters.older === null;
  for (const id of ["letters-replay", "letters-discard"]) byId(id).disabled = letters.status !== "pending" || !found.letters.length;
  say("letters-said", found.letters.length ? "" : "No dead letter is like this.");
  byId("letters").hidden = !found.letters.length;
  fill("letters", found.letters, (each) => each.letter, (each) => {
    const row = rowOf("long", "long", "number", "long", "", "long", ...(session.writes ? ["change"] : []));
    row.cells[6].append(contents(each));
    if (session.writes) {
      row.cells[7].append(...["replay", "discard"].map((name) => {
        const made = button(name === "replay" ? "Replay" : "Discard", () => confirmLetters(name, each));
        made.setAttribute("aria-label", `${made.textContent} the dead letter of ${stamp.format(new Date(1000 * each.at))}`);
        return made;
      }));
    }
    return row;
  }, (row, each) => {
    cells(row, stamp.format(new Date(1000 * each.at)), each.key ?? "–", each.stream, whole.format(each.attempts),
      each.error, each.status);
    for (const made of row.cells[7]?.children ?? []) made.disabled = each.status !== "pending";
  });
}

function contents(each) {
  const made = element("details", {}, element("summary", {}, size(each.bytes)));
  const facts = element("dl", {}, element("dt", {}, "letter"), element("dd", {}, each.letter),
    element("dt", {}, "event"), element("dd", {}, each.event));
  for (const [name, value] of Object.entries(each.headers)) {
    facts.append(element("dt", {}, `header ${name}`), element("dd", {}, value));
  }
  made.append(facts, element("pre", {}, each.data));
  if (!each.is_text) made.append(element("p", { class: "empty" }, "base64"));
  return made;
}

const RESULTS = {
  replay: "The event comes after all events that its stream has now. All groups of that stream read it.",
  discard: "No replay takes it any more. It stays in its stream.",
};

function confirmLetters(name, each) {
  const verb = name === "replay" ? "Replay" : "Discard";
  confirm(`${verb} the dead letter ${each.letter}?`, RESULTS[name], verb,
    () => changeLetters(name, { stream: letters.stream, letters: [each.letter] }));
}

function confirmAllLetters(name) {
  const verb = name === "replay" ? "Replay" : "Discard";
  const { stream, error, key } = letters;
  const selected = [error && `with “${error}” in their error`, key && `with the routing key “${key}”`].filter(Boolean);
  confirm(`${verb} pending dead letters of ${stream}?`,
    `All ${selected.join(" and ") || "that are pending"}, also those on other pages, and at most 1,000 at once. ${RESULTS[name]}`, verb,
    () => changeLetters(name, { stream, error: error || null, key: key || null }));
}

async function changeLetters(name, body) {
  const { done } = await send(`dead-letters/${name}`, body);
  await loadLetters();
  say("letters-said", done);
}

byId("letters-filter").addEventListener("submit", (event) => {
  event.preventDefault();
  for (const name of ["status", "error", "key"]) letters[name] = byId(`letters-${name}`).value;
  letters.older = null;
  loadLetters();
});
byId("letters-older").addEventListener("click", () => { letters.older = letters.next; loadLetters(); });
byId("letters-newest").addEventListener("click", () => { letters.older = null; loadLetters(); });
for (const name of ["replay", "discard"]) byId(`letters-${name}`).addEventListener("click", () => confirmAllLetters(name));

// ---------------------------------------------------------------- shared states

const MAX_UPDATES = 200;
/** The shared state that is shown, and when this page saw each of its updates: their log has no times. */
let state = null;

function openState(name) {
  state = { name, limit: 20, known: null, seen: new Map(), isLoading: false };
  byId("state-updates").tBodies[0].replaceChildren();
  byId("state-fields").replaceChildren();
  for (const id of ["state-failed", "state-since", "state-earlier"]) say(id, "", false);
  say("state-of", name);
  byId("state-page").hidden = false;
  byId("state-of").focus();
  loadState();
}

async function loadState() {
  const asked = state;
  if (asked.isLoading) return;
  asked.isLoading = true;
  const wanted = new URLSearchParams({ name: asked.name, limit: asked.limit });
  if (asked.known !== null) wanted.set("known", asked.known);
  try {
    const found = await ask(`states?${wanted}`);
    if (asked !== state) return;
    say("state-failed", "", false);
    if (!found.is_unchanged) showState(found);
  } catch (error) {
    if (asked === state) say("state-failed", error.message);
  } finally {
    asked.isLoading = false;
  }
}

function showState(found) {
  const isFirst = state.known === null;
  state.known = found.known;
  say("state-of", found.type ? `${found.name}: ${found.type}` : found.name);
  say("state-since", `This is its last snapshot. Only its application can apply the ${count(found.entries_since, "later change")}.`,
    found.entries_since > 0);
  byId("state-fields").replaceChildren(...Object.entries(found.fields).flatMap(
    ([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  const now = clock.format(new Date());
  const seen = new Map(found.updates.map((each) => [each.revision, state.seen.get(each.revision) ?? (isFirst ? "before" : now)]));
  state.seen = seen;
  fill("state-updates", found.updates, (each) => each.revision, () => rowOf("", "", "", "long"),
    (row, each) => cells(row, each.revision, seen.get(each.revision), each.writer, each.update, each.fields));
  byId("state-more").hidden = found.earlier === 0 || state.limit >= MAX_UPDATES;
  say("state-earlier", `${count(found.earlier, "earlier update")} in the log`, found.earlier > 0);
}

byId("state-more").addEventListener("click", () => {
  state.limit = MAX_UPDATES;
  state.known = null; // all that comes now was there before
  loadState();
});

// ---------------------------------------------------------------- changes

const streamOf = (each) => each.segment.slice(0, each.segment.lastIndexOf("/"));
const numberOf = (each) => Number(each.segment.slice(each.segment.lastIndexOf("/") + 1));

function button(text, action) {
  const made = element("button", { type: "button" }, text);
  made.addEventListener("click", action);
  return made;
}

function offerScaling(cell, each, next) {
  const wanted = [`split ${each.segment}`, ...(next ? [`merge ${each.segment} ${next.segment}`] : [])].join("|");
  if (cell.dataset.offer === wanted) return;
  cell.dataset.offer = wanted;
  const stream = streamOf(each);
  const buttons = [button("Split", () => confirm(`Split ${each.segment}?`,
    "Its keys are divided between two new segments. Readers read it to its end first.", "Split",
    () => change(chosen, "scale", { stream, split: [numberOf(each)] })))];
  if (next) {
    buttons.push(button("Merge up", () => confirm(`Merge ${each.segment} with ${next.segment}?`,
      "One new segment takes the keys of both. Readers read both to their ends first.", "Merge",
      () => change(chosen, "scale", { stream, merge: [numberOf(each), numberOf(next)] }))));
  }
  cell.replaceChildren(...buttons);
}

function confirmReset(to, isCheckpoint) {
  const place = isCheckpoint ? `checkpoint ${to}` : to;
  const result = to === "tail" && !isCheckpoint ? "The group skips all events that it has not read." :
    "The group reads again what it has read since then.";
  confirm(`Reset ${chosen} to ${place}?`, result, "Reset",
    () => change(chosen, "reset", { to, is_checkpoint: isCheckpoint }));
}

function confirmRemoval(reader) {
  confirm(`Remove the reader ${reader}?`, "Its segments go to other readers. If it still runs, its next call fails.",
    "Remove", () => change(chosen, "remove-reader", { reader }));
}

function confirm(title, text, verb, action, { asksName = false } = {}) {
  const dialog = byId("confirm");
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-do").textContent = verb;
  byId("confirm-do").disabled = false;
  byId("confirm-field").hidden = !asksName;
  const field = byId("confirm-name");
  field.required = asksName;
  field.value = asksName ? `page-${new Date().toISOString().slice(0, 19).replaceAll(":", "-")}` : "";
  say("confirm-error", "", false);
  dialog.querySelector("form").onsubmit = async (event) => {
    if (event.submitter?.value !== "do") return;
    event.preventDefault();
    byId("confirm-do").disabled = true;
    try {
      await action(field.value);
      dialog.close();
    } catch (error) {
      say("confirm-error", error.message);
      byId("confirm-do").disabled = false;
    }
  };
  dialog.showModal();
}

const ACTIONS = {
  checkpoint: () => confirm(`Take a checkpoint of ${chosen}?`, "All readers pass it between two events.", "Take it",
    (name) => change(chosen, "checkpoint", { name }), { asksName: true }),
  head: () => confirmReset("head", false),
  tail: () => confirmReset("tail", false),
};

// ---------------------------------------------------------------- begin

for (const table of document.querySelectorAll("table")) {
  table.setAttribute("role", "table");
  for (const each of [table.tHead, ...table.tBodies]) each.setAttribute("role", "rowgroup");
  for (const row of table.tHead.rows) {
    row.setAttribute("role", "row");
    for (const cell of row.cells) cell.setAttribute("role", "columnheader");
  }
}
for (const each of document.querySelectorAll("[data-action]")) {
  each.addEventListener("click", () => ACTIONS[each.dataset.action]());
}
byId("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  say("login-error", "");
  try {
    await ask("login", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ token: byId("token").value }),
    });
    byId("token").value = "";
    await begin();
  } catch (error) {
    say("login-error", error.message);
  }
});
byId("logout").addEventListener("click", async () => {
  await ask("logout", { method: "POST", headers: { "x-readergroup-csrf": session.csrf } });
  showLogin();
});
byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
window.addEventListener("hashchange", () => { if (session !== null) follow(); });
begin();
