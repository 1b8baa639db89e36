"use strict";
// Draws the figures in the page's colours, again whenever those change.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const slotColour = (slot) => colour(slot < 0 ? "--muted" : `--c${slot % 8}`);

  function coloured(trace) {
    const { slot, part, width, dash, size, opacity, symbol, edge } = trace.meta;
    const color = slotColour(slot);
    if (part === "band") return { ...trace, fillcolor: `${color}2b`, line: { ...trace.line, color: "rgba(0,0,0,0)" } };
    if (part === "line") return { ...trace, line: { ...trace.line, color, width, dash } };
    const marker = { color, size, opacity: opacity ?? 1, symbol: symbol ?? "circle" };
    if (edge) marker.line = { color: colour("--paper"), width: edge };
    const bars = (error) => error && { ...error, color };
    return { ...trace, marker, error_x: bars(trace.error_x), error_y: bars(trace.error_y) };
  }

  // Ticks of a log axis come from Python (figures.log_scale); plotly's own repeat "2 5" and leave decades without a label.
  function onLogScale(spec, scale, narrow) {
    if (!scale) return spec;
    return { ...spec, range: scale.range, tickmode: "array", tickvals: scale.at, ticktext: narrow ? scale.narrow : scale.wide, tickangle: 0 };
  }

  function axis(layout, letter, narrow) {
    const name = `${letter}axis`;
    const spec = onLogScale(layout[name], layout.meta?.[name], letter === "x" && narrow);
    return {
      gridcolor: colour("--line"), linecolor: colour("--muted"), zerolinecolor: colour("--muted"), zeroline: false, separatethousands: true,
      ticks: "outside", tickcolor: colour("--line"), automargin: true, ...spec,
      title: { ...(spec?.title ?? {}), font: { size: 12.5, color: colour("--muted") }, standoff: 8 },
    };
  }

  function layout(figure, width) {
    const narrow = width < 700, named = figure.data.filter((trace) => trace.name && trace.showlegend !== false);
    return {
      ...figure.layout, xaxis: axis(figure.layout, "x", narrow), yaxis: axis(figure.layout, "y", narrow),
      margin: { l: 58, r: 12, t: 34, b: 46 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: colour("--ink") },
      showlegend: narrow && named.length > 6 ? false : figure.layout.showlegend,  // the tables have the colours
      legend: { orientation: "h", traceorder: "normal", x: 0, y: 1.02, yanchor: "bottom", font: { size: narrow ? 11 : 13 } },
      modebar: { color: colour("--muted"), activecolor: colour("--accent"), bgcolor: "rgba(0,0,0,0)" },
      hovermode: "closest", hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
    };
  }

  // On paper the browser lays out only after the figures are drawn: their size is given.
  function draw(paper) {
    for (const [name, figure] of Object.entries(figures)) {
      const plot = document.getElementById(name);
      if (figure.layout.height) plot.style.height = `${figure.layout.height}px`;
      const config = {
        displaylogo: false, responsive: true, modeBarButtons: [["toImage"]],
        toImageButtonOptions: { format: "svg", filename: `kvtape-${name}`, width: 1000, height: 420 },
      };
      const size = paper ? { width: 680, height: figure.layout.height ?? 340 } : {};
      const layoutOf = { ...layout(figure, size.width ?? plot.clientWidth), ...size };
      Plotly.react(plot, figure.data.map(coloured), layoutOf, config);
    }
  }

  draw(false);
  for (const query of ["(prefers-color-scheme: dark)", "(max-width: 760px)"]) matchMedia(query).addEventListener("change", () => draw(false));
  addEventListener("beforeprint", () => draw(true));
  addEventListener("afterprint", () => draw(false));
})();
