// Ask for the sections that have changed since the last answer, and put them in place. The server answers when
// there is something new, so that no timer is needed: browsers slow timers down in tabs that nobody looks at.
"use strict";
const root = document.documentElement;
const notice = document.getElementById("connection");
const waiting = new Map(); // the new HTML of sections in which somebody selects text, by their ids
let seen = Number(root.dataset.seen);
let failures = 0;

function say(text) {
  notice.textContent = text;
  notice.hidden = !text;
}

function isSelectedIn(section) {
  const selection = getSelection();
  return !selection.isCollapsed && [selection.anchorNode, selection.focusNode].some((node) => section.contains(node));
}

function put(id, html) {
  const section = document.getElementById(id);
  if (!section) return;
  if (isSelectedIn(section)) {
    waiting.set(id, html);
    return;
  }
  waiting.delete(id);
  const open = [...section.querySelectorAll("details")].map((details) => details.open);
  const scrolled = [...section.querySelectorAll(".scroll, pre, .drawing")].map((e) => [e.scrollLeft, e.scrollTop]);
  section.innerHTML = html;
  section.querySelectorAll("details").forEach((details, k) => { details.open = open[k] || false; });
  section.querySelectorAll(".scroll, pre, .drawing").forEach((e, k) => { if (scrolled[k]) e.scrollTo(...scrolled[k]); });
}

document.addEventListener("selectionchange", () => {
  for (const [id, html] of [...waiting]) put(id, html);
});

// Return the milliseconds until the next question; null if there is nothing more to ask.
async function ask() {
  const query = new URLSearchParams(location.search);
  query.set("seen", seen);
  query.set("version", root.dataset.version);
  query.set("run", root.dataset.run);
  const reply = await fetch("state?" + query, { cache: "no-store", signal: AbortSignal.timeout(20000) });
  if (reply.status === 403) {
    say("This link is of another run. Open the link that the new run has printed.");
    return null;
  }
  if (reply.status === 409) {
    location.reload();
    return null;
  }
  if (reply.status === 503) return 3000;
  if (!reply.ok) throw new Error(String(reply.status));
  const state = await reply.json();
  root.dataset.run = state.run; // another run may serve this port, with the same token; it has sent all sections
  for (const [id, html] of Object.entries(state.sections)) put(id, html);
  document.title = state.title;
  seen = state.seen;
  failures = 0;
  say(state.over ? "The run has ended. This is its last state." : "");
  return state.over ? null : 0;
}

async function follow() {
  for (let pause = 0; pause !== null;) {
    try {
      pause = await ask();
    } catch (error) {
      failures += 1;
      if (failures > 1) say("The run does not answer. It has ended, or the connection to it is broken. This is its last state.");
      pause = Math.min(15000, 1000 * failures);
    }
    if (pause) await new Promise((resume) => setTimeout(resume, pause));
  }
}

follow();
