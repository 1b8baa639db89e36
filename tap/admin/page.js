"use strict";
// Asks for /live.json every two seconds and shows it: texts as they come, numbers as inline SVG. Draws nothing hidden.
(() => {
  const POLL_MS = 2000;
  const HEIGHT = 250;
  const FRAME = { left: 40, right: 14, top: 10, bottom: 34 };
  const SVG = "http://www.w3.org/2000/svg";
  const TIMES_MS = [[1, "1 ms"], [10, "10 ms"], [100, "100 ms"], [1e3, "1 s"], [1e4, "10 s"], [1e5, "100 s"]];
  const THOUSANDS = ["", "k", "M", "G", "T"];
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

  const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
  const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

  // A plot: shares on the y axis, a logarithmic x axis.
  function plot(place, low, high, ticks, title) {
    const width = Math.max(place.clientWidth, 260);
    place.replaceChildren();
    const svg = draw(place, "svg", { viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" });
    const right = width - FRAME.right, bottom = HEIGHT - FRAME.bottom;
    const from = Math.log(low), span = Math.log(high) - from;
    const x = (value) => FRAME.left + (right - FRAME.left) * Math.min(1, Math.max(0, (Math.log(value) - from) / span));
    const y = (share) => bottom - (bottom - FRAME.top) * share;
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      draw(svg, "line", { class: share ? "grid" : "axis", x1: FRAME.left, x2: right, y1: y(share), y2: y(share) });
      draw(svg, "text", { x: FRAME.left - 7, y: y(share) + 4, "text-anchor": "end" }, `${100 * share}%`);
    }
    for (const [value, text] of ticks.filter(([value]) => value >= low && value <= high)) {
      draw(svg, "line", { class: "grid", x1: x(value), x2: x(value), y1: FRAME.top, y2: bottom });
      draw(svg, "text", { x: x(value), y: bottom + 15, "text-anchor": "middle" }, text);
    }
    draw(svg, "text", { x: right, y: HEIGHT - 4, "text-anchor": "end" }, title);
    const value = (at) => Math.exp(from + span * (at - FRAME.left) / (right - FRAME.left));
    return { svg, x, y, right, bottom, value };
  }

  // A line under the pointer with the values of the curves there. It stays through redraws while the pointer rests.
  function readOut(place, { svg, bottom, right, value }, say) {
    const line = draw(svg, "line", { class: "at", y1: FRAME.top, y2: bottom, visibility: "hidden" });
    const words = place.parentElement.querySelector("h3 .at");
    const point = () => {
      const at = place.pointer;
      const inside = at !== undefined && at >= FRAME.left && at <= right;
      line.setAttribute("visibility", inside ? "visible" : "hidden");
      words.textContent = inside ? say(value(at)) : "";
      if (inside) for (const end of ["x1", "x2"]) line.setAttribute(end, at);
    };
    place.onpointermove = (event) => { place.pointer = event.clientX - place.getBoundingClientRect().left; point(); };
    place.onpointerleave = () => { place.pointer = undefined; point(); };
    point();
  }

  const timeText = (ms) => (ms < 10 ? `${ms.toFixed(1)} ms` : ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toPrecision(3)} s`);
  const sizeText = (tokens) => {
    const group = Math.max(0, Math.floor(Math.log10(tokens) / 3));
    return `${(tokens / 1000 ** group).toPrecision(3)}${THOUSANDS[group]} tokens`;
  };
  // The value of the last step at or before a place; ``before`` if there is none.
  const lastAt = (places, values, at, before) => {
    let found = before;
    for (let i = 0; i < places.length && places[i] <= at; i += 1) found = values[i];
    return found;
  };

  // Corners of a curve that keeps a value until the next time.
  function steps(times, values, until) {
    const corners = [[times[0], values[0]]];
    for (let i = 1; i < times.length; i += 1) corners.push([times[i], values[i - 1]], [times[i], values[i]]);
    corners.push([Math.max(until, times[times.length - 1]), values[values.length - 1]]);
    return corners;
  }

  function drawSurvival(figure, cohorts) {
    const place = figure.querySelector(".plot");
    const judged = cohorts.filter((cohort) => cohort.times_ms.length);
    const empty = !cohorts.length;
    figure.querySelector(".empty").hidden = !empty;
    figure.querySelector("table").hidden = empty;
    place.hidden = !judged.length;
    const rows = cohorts.map((cohort) => survivalRow(cohort, cohorts.indexOf(cohort)));
    figure.querySelector("tbody").replaceChildren(...rows);
    if (!judged.length) return;
    const low = Math.min(...judged.map((cohort) => cohort.times_ms[0])) / 1.3;
    const high = Math.max(...judged.map((cohort) => cohort.until_ms), low * 4);
    const frame = plot(place, low, high, timeTicks(low, high), "time since arrival");
    for (const cohort of judged) drawCurve(frame.svg, frame.x, frame.y, low, cohort, cohorts.indexOf(cohort));
    readOut(place, frame, (at) => [`after ${timeText(at)}`, ...judged.filter((one) => at <= one.until_ms)
      .map((one) => `${one.title} ${percent(lastAt(one.times_ms, one.waiting, at, 1))}`)].join(" · "));
    const told = judged.map((cohort) => `${cohort.title}: ${cohort.quantiles.map((one) => `${one.level} ${one.text}`).join(", ")}`);
    place.setAttribute("aria-label", `Share of requests still waiting for the first token. ${told.join(". ")}`);
  }

  function drawCurve(svg, x, y, start, cohort, slot) {
    const { times_ms: times, waiting, low, high, until_ms: until } = cohort;
    const place = ([time, share]) => [x(time), y(share)];
    const upper = steps(times, high, until).map(place), lower = steps(times, low, until).map(place);
    draw(svg, "path", { class: `band f${slot % 6}`, d: `${path([...upper, ...lower.reverse()])}Z` });
    const whole = [[start, 1], [times[0], 1], ...steps(times, waiting, until)].map(place);
    draw(svg, "path", { class: `curve s${slot % 6}`, d: path(whole), "data-cohort": cohort.cohort });
  }

  function survivalRow(cohort, slot) {
    const row = make("tr", { "data-cohort": cohort.cohort });
    const head = make("th", { scope: "row" });
    const key = draw(head, "svg", { class: "key", viewBox: "0 0 14 8", "aria-hidden": "true" });
    draw(key, "line", { class: `s${slot % 6}`, x1: 0, x2: 14, y1: 4, y2: 4 });
    head.append(cohort.title, make("small", {}, cohort.count));
    row.append(head, ...cohort.quantiles.map((one) => make("td", {}, one.text)));
    return row;
  }

  function timeTicks(low, high) {
    const found = TIMES_MS.filter(([time]) => time >= low && time <= high);
    if (found.length > 2) return found;
    const finer = [];
    for (const [time] of TIMES_MS) for (const times of [1, 2, 5]) {
      const at = time * times;
      finer.push([at, at < 1000 ? `${at} ms` : `${at / 1000} s`]);
    }
    return finer;
  }

  function tokenTicks(low, high) {
    const ticks = [];
    const factor = high / low > 1e4 ? 10 : 4;
    for (let power = 0; power < 13; power += 1) {
      const at = factor === 10 ? 10 ** power : 1000 * 4 ** (power - 2);
      const group = Math.max(0, Math.floor(Math.log10(at) / 3 + 1e-9));
      ticks.push([at, `${Math.round(at / 1000 ** group * 100) / 100}${THOUSANDS[group]}`]);
    }
    return ticks;
  }

  function drawHitCurve(figure, curve) {
    const place = figure.querySelector(".plot");
    const { tokens, hit_share: shares } = curve;
    const empty = !tokens.length;
    figure.querySelector(".empty").hidden = !empty;
    place.hidden = empty;
    figure.querySelector(".sentence").textContent = empty ? "" : curve.sentence;
    figure.querySelector(".fine").textContent = empty ? "" : curve.note;
    if (empty) return;
    const last = tokens[tokens.length - 1];
    const frame = plot(place, tokens[0], last, tokenTicks(tokens[0], last), "cache size, tokens");
    const { svg, x, y, bottom } = frame;
    const points = tokens.map((size, i) => [x(size), y(shares[i])]);
    draw(svg, "path", { class: "band f1", d: `${path([[x(tokens[0]), bottom], ...points, [x(last), bottom]])}Z` });
    draw(svg, "path", { class: "curve s1", d: path(points), "data-curve": "hit-curve" });
    if (curve.exact_tokens < last) drawExact(svg, x(curve.exact_tokens), bottom);
    if (curve.engine_tokens !== null) drawEngine(svg, x, y, bottom, curve, place.clientWidth);
    readOut(place, frame, (at) => `${sizeText(at)} · ${percent(lastAt(tokens, shares, at, shares[0]))}`);
    place.setAttribute("aria-label", curve.sentence);
  }

  function drawExact(svg, at, bottom) {
    draw(svg, "line", { class: "exact", x1: at, x2: at, y1: FRAME.top, y2: bottom });
    draw(svg, "text", { class: "halo", x: at + 5, y: bottom - 6 }, "sampled from here");
  }

  function drawEngine(svg, x, y, bottom, curve, width) {
    const at = x(curve.engine_tokens);
    const [anchor, aside] = at > width / 2 ? ["end", -8] : ["start", 8];
    draw(svg, "line", { class: "mark", x1: at, x2: at, y1: FRAME.top, y2: bottom });
    draw(svg, "text", { class: "marked halo", x: at + aside, y: bottom - 8, "text-anchor": anchor }, "the engine's cache");
    draw(svg, "circle", { class: "of-curve", cx: at, cy: y(curve.engine_share), r: 3.5 });
    if (curve.measured_share === null) return;
    const height = y(curve.measured_share);
    draw(svg, "circle", { class: "measured", cx: at, cy: height, r: 4.5 });
    const below = curve.measured_share < 0.15 ? -12 : 20;
    const text = `measured ${percent(curve.measured_share)}`;
    draw(svg, "text", { class: "of-measured halo", x: at + aside, y: height + below, "text-anchor": anchor }, text);
  }

  function showPrefixes(figure, prefixes) {
    figure.querySelector(".empty").hidden = prefixes.length > 0;
    figure.querySelector(".scroll").hidden = !prefixes.length;
    figure.querySelector("tbody").replaceChildren(...prefixes.map((prefix) => {
      const row = make("tr");
      const head = make("th", { scope: "row", class: "hash" }, prefix.hash);
      const share = make("td", {}, prefix.share);
      const bar = make("span", { class: "bar", "aria-hidden": "true" });
      bar.appendChild(make("i")).style.width = `${100 * prefix.bar}%`;
      share.append(bar);
      row.append(head, make("td", {}, prefix.depth), make("td", {}, prefix.requests), share);
      return row;
    }));
  }

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
    for (const figure of document.querySelectorAll("[data-survival]")) drawSurvival(figure, live[figure.dataset.survival]);
    drawHitCurve(byId("hit-curve"), live.hit_curve);
    showPrefixes(byId("prefixes"), live.prefixes);
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
  addEventListener("resize", show);
  setTimeout(poll, POLL_MS);
})();
