"use strict";
// Asks for /live.json every two seconds and shows it: texts as they come, numbers as inline SVG. Draws nothing hidden.
(() => {
  const POLL_MS = 2000;
  const SVG = "http://www.w3.org/2000/svg";
  const byId = (id) => document.getElementById(id);
  let live = JSON.parse(byId("first").textContent);

  function make(name, attributes = {}, text = null) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== null) element.textContent = text;
    return element;
  }

  function draw(parent, name, attributes = {}, text = null) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== null) element.textContent = text;
    return parent.appendChild(element);
  }

  const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

  function showTile(tile) {
    const place = document.querySelector(`[data-tile="${tile.id}"]`);
    place.querySelector(".value").textContent = tile.value;
    place.querySelector(".detail").textContent = tile.detail;
    place.dataset.alarm = tile.id === "dropped" && tile.value !== "0" ? "yes" : "no";
    const svg = place.querySelector(".line");
    svg.replaceChildren();
    if (tile.line.length < 2) return;
    const top = Math.max(...tile.line, 1e-9);
    const points = tile.line.map((value, i) => [120 - 120 * (tile.line.length - 1 - i) / Math.max(60, tile.line.length - 1), 25 - 23 * value / top]);
    draw(svg, "path", { class: "under", d: `${path([[points[0][0], 26], ...points, [120, 26]])}Z` });
    draw(svg, "path", { d: path(points) });
  }

  function showFacts(list, facts) {
    list.parentElement.querySelector(".empty").hidden = facts.length > 0;
    list.replaceChildren(...facts.flatMap((fact) => [
      make("dt", {}, fact.name), make("dd", fact.alarm ? { class: "alarm" } : {}, fact.value),
    ]));
  }

  function showStatus() {
    const pill = byId("status");
    pill.textContent = live.status;
    pill.dataset.ready = live.ready ? "yes" : "no";
    byId("reasons").hidden = live.ready;
    byId("reasons").replaceChildren(...live.reasons.map((reason) => make("li", {}, reason)));
    document.body.classList.remove("stale");
  }

  function show() {
    for (const place of document.querySelectorAll("[data-text]")) place.textContent = live[place.dataset.text];
    showStatus();
    live.tiles.forEach(showTile);
    for (const list of document.querySelectorAll("[data-facts]")) showFacts(list, live[list.dataset.facts]);
  }

  function showSilence() {
    byId("status").textContent = "not answering";
    byId("status").dataset.ready = "no";
    document.body.classList.add("stale");
  }

  async function poll() {
    if (!document.hidden) {
      try {
        const answer = await fetch("live.json");
        if (!answer.ok) throw new Error(answer.status);
        live = await answer.json();
        show();
      } catch {
        showSilence();
      }
    }
    setTimeout(poll, POLL_MS);
  }

  show();
  setTimeout(poll, POLL_MS);
})();
