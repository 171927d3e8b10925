// Draws the plots from the JSON beside it, in the colours that the style sheet names, and again when those change.
(() => {
  "use strict";
  const root = document.documentElement;
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const PAPER = 660;

  // "--c0/0.2" -> the colour that the style sheet gives --c0, at opacity 0.2
  const colour = (name, css) => {
    const [variable, opacity] = name.split("/");
    const hex = css.getPropertyValue(variable).trim();
    if (opacity === undefined) return hex;
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    return `rgba(${r},${g},${b},${opacity})`;
  };

  const resolved = (value, css, key) => {
    if (Array.isArray(value)) return value.map((v) => resolved(v, css, key));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, resolved(v, css, k)]));
    }
    const named = typeof value === "string" && value.startsWith("--") && /color$/.test(key);
    return named ? colour(value, css) : value;
  };

  const axis = (own) => ({
    gridcolor: "--grid", linecolor: "--line", zerolinecolor: "--muted", zerolinewidth: 1, ticks: "outside",
    tickcolor: "--line", ticklen: 4, automargin: true, fixedrange: coarse, ...own,
    title: { standoff: 10, ...own.title },
  });

  // lines of the legend below the plot, from what its entries need side by side
  const legendRows = (data, width) => {
    const names = data.filter((t) => t.showlegend !== false).map((t) => 62 + 6.6 * t.name.length);
    const widest = Math.max(0, ...names);
    return names.length < 2 ? 0 : Math.ceil(names.length / Math.max(1, Math.floor(width / widest)));
  };

  const draw = (plot) => {
    const box = document.getElementById(plot.id);
    if (!box) return;
    const css = getComputedStyle(root);
    const paper = root.classList.contains("paper");
    const width = paper ? Math.min(PAPER, box.clientWidth || PAPER) : box.clientWidth;
    const rows = legendRows(plot.data, width);
    const height = (width > 760 ? 400 : 320) + 22 * rows;
    box.style.minHeight = `${height}px`;
    const font = { family: css.getPropertyValue("--sans"), size: 12, color: "--text" };
    const layout = {
      ...plot.layout,
      width, height, font, autosize: false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 8, r: 12, t: 26, b: 8 },
      hovermode: "x unified", hoverdistance: -1, dragmode: coarse ? false : "zoom",
      hoverlabel: { bgcolor: "--bg", bordercolor: "--line", font, namelength: 40 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: "--muted", activecolor: "--text" },
      showlegend: rows > 0,
      legend: { orientation: "h", x: 0, xanchor: "left", xref: "container", y: 0, yref: "container", yanchor: "bottom", font },
      xaxis: { zeroline: false, ...axis(plot.layout.xaxis) }, yaxis: axis(plot.layout.yaxis),
    };
    const config = {
      displaylogo: false, displayModeBar: coarse ? false : "hover", scrollZoom: false,
      modeBarButtons: [["resetScale2d", "toImage"]], toImageButtonOptions: { filename: plot.id, scale: 2 },
    };
    window.Plotly.react(box, resolved(plot.data, css), resolved(layout, css), config);
  };

  const drawAll = () => plots.forEach(draw);

  // Drawn one after another, so that the page answers meanwhile.
  const first = (i) => {
    if (i === plots.length) {
      root.dataset.drawn = "true";
      return;
    }
    draw(plots[i]);
    setTimeout(first, 0, i + 1);
  };
  first(0);

  let waiting = 0;
  let known = root.clientWidth;
  window.addEventListener("resize", () => {
    if (root.classList.contains("paper") || root.clientWidth === known) return;
    known = root.clientWidth;
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 120);
  });
  dark.addEventListener("change", drawAll);

  const opened = [];
  window.addEventListener("beforeprint", () => {
    root.classList.add("paper");
    document.querySelectorAll("details.words:not([open]), #classes details:not([open])").forEach((d) => {
      d.open = true;
      opened.push(d);
    });
    drawAll();
  });
  window.addEventListener("afterprint", () => {
    root.classList.remove("paper");
    opened.splice(0).forEach((d) => { d.open = false; });
    drawAll();
  });
})();
