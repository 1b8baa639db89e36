"use strict";
// Asks for /live.json every two seconds and shows it: texts as they come, numbers as inline SVG.
(() => {
  const POLL_MS = 2000;
  const SVG = "http://www.w3.org/2000/svg";
  const pill = document.getElementById("status");
  const reasons = document.getElementById("reasons");

  function make(name, text, attributes = {}) {
    const element = document.createElement(name);
    element.textContent = text;
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  }

  function drawn(line) {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 120 26");
    svg.setAttribute("preserveAspectRatio", "none");
    if (line.length < 2) return svg;
    const top = Math.max(...line, 1e-9);
    const step = 120 / Math.max(60, line.length - 1);
    const points = line.map((value, i) => `${(120 - step * (line.length - 1 - i)).toFixed(1)} ${(25 - 23 * value / top).toFixed(1)}`);
    svg.appendChild(document.createElementNS(SVG, "path")).setAttribute("d", `M${points.join("L")}`);
    return svg;
  }

  function tile(shown) {
    const element = make("article", "", { class: "tile", "data-alarm": shown.alarm });
    element.append(make("h2", shown.title), make("p", shown.value, { class: "value" }));
    element.append(make("p", shown.detail, { class: "detail" }), drawn(shown.line));
    return element;
  }

  function show(live) {
    document.title = `${live.trace} · kvtape tap`;
    for (const place of document.querySelectorAll("[data-text]")) place.textContent = live[place.dataset.text];
    pill.textContent = live.status;
    pill.dataset.ready = live.ready ? "yes" : "no";
    reasons.hidden = live.ready;
    reasons.replaceChildren(...live.reasons.map((reason) => make("li", reason)));
    document.querySelector(".tiles").replaceChildren(...live.tiles.map(tile));
    for (const list of document.querySelectorAll("[data-facts]")) {
      const facts = live[list.dataset.facts];
      list.replaceChildren(...facts.flatMap((fact) => [make("dt", fact.name), make("dd", fact.value, { "data-alarm": fact.alarm })]));
      const empty = list.parentElement.querySelector(".empty");
      if (empty) empty.hidden = facts.length > 0;
    }
  }

  async function poll() {
    if (!document.hidden) {
      try {
        const answer = await fetch("live.json");
        if (!answer.ok) throw new Error(answer.status);
        show(await answer.json());
        document.body.classList.remove("stale");
      } catch {
        pill.textContent = "not answering";
        pill.dataset.ready = "no";
        document.body.classList.add("stale");
      }
    }
    setTimeout(poll, POLL_MS);
  }

  poll();
})();
