"use strict";
// Draws the figures in the page's colours, again whenever those change; switches axes.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 760px)");
  const printing = window.matchMedia("print");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const slotColour = (slot) => colour(slot < 0 ? "--muted" : `--c${slot % 8}`);
  const faint = (hex) => `${hex}2b`;

  function coloured(trace) {
    const { slot, part, width, dash, size, opacity, symbol, edge } = trace.meta;
    const own = slotColour(slot);
    if (part === "band") return { ...trace, fillcolor: faint(own), line: { ...trace.line, color: "rgba(0,0,0,0)" } };
    if (part === "line") return { ...trace, line: { ...trace.line, color: own, width, dash } };
    const marker = { color: own, size, opacity: opacity ?? 1, symbol: symbol ?? "circle" };
    if (edge) marker.line = { color: colour("--paper"), width: edge };
    const bars = (error) => error && { ...error, color: own };
    return { ...trace, marker, error_x: bars(trace.error_x), error_y: bars(trace.error_y) };
  }

  // Both kinds of ticks come from Python (figures.log_scale); plotly's own repeat "2 5" and leave decades without a label.
  function onLogScale(given, scale, letter, width) {
    if (given?.type !== "log" || !scale) return given;
    const labels = letter === "y" || width > 700 ? scale[letter] : width > 420 ? scale.half : scale.narrow;
    return { ...given, range: scale.range, tickmode: "array", tickvals: scale.at, ticktext: labels, tickangle: 0 };
  }

  function axis(layout, letter, width) {
    const name = `${letter}axis`;
    const given = onLogScale(layout[name], layout.meta?.log?.[name], letter, width);
    return {
      gridcolor: colour("--line"), linecolor: colour("--muted"), zerolinecolor: colour("--muted"), zeroline: false, separatethousands: true,
      ticks: "outside", tickcolor: colour("--line"), automargin: true, ...given,
      title: { ...(given?.title ?? {}), font: { size: 12.5, color: colour("--muted") }, standoff: 8 },
    };
  }

  function layout(figure, width) {
    return {
      ...figure.layout, xaxis: axis(figure.layout, "x", width), yaxis: axis(figure.layout, "y", width),
      margin: { l: 58, r: 12, t: 34, b: 46 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: colour("--ink") },
      legend: { orientation: "h", traceorder: "normal", x: 0, y: 1.02, yanchor: "bottom", font: { size: narrow.matches ? 11 : 13 } },
      hovermode: "closest", hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
    };
  }

  const config = {
    displaylogo: false, displayModeBar: false, responsive: true, showLink: false,
  };

  function draw() {
    for (const [name, figure] of Object.entries(figures)) {
      const place = document.getElementById(name);
      if (place && figure.layout.height) place.style.height = `${figure.layout.height}px`;
      if (place) Plotly.react(place, figure.data.map(coloured), layout(figure, place.clientWidth), config);
    }
  }

  function turn(given) {
    given.type = given.type === "log" ? "linear" : "log";
  }

  for (const group of document.querySelectorAll(".toggles")) {
    const figure = figures[group.dataset.for];
    group.querySelector(".save").addEventListener("click", () => {
      const place = document.getElementById(group.dataset.for);
      Plotly.downloadImage(place, { format: "svg", filename: `kvtape-${group.dataset.for}`, width: 1000, height: 420 });
    });
    for (const button of group.querySelectorAll("[data-axis]")) {
      const which = button.dataset.axis;
      const say = () => { button.textContent = `${which[0]}: ${figure.layout[which].type === "log" ? "log" : "linear"}`; };
      button.addEventListener("click", () => { turn(figure.layout[which]); say(); draw(); });
      say();
    }
  }
  draw();
  for (const query of [dark, narrow, printing]) query.addEventListener("change", draw);
  for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", draw);
})();
