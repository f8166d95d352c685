
(() => {
  const holder = document.getElementById("surfaces");
  if (!holder) return;
  const info = JSON.parse(holder.textContent), START = { yaw: -0.65, pitch: 0.6 };
  let { yaw, pitch } = START, logarithmic = true, waiting = false;
  const canvases = [...document.querySelectorAll("canvas[data-surface]")];

  // Colours of a surface from low to high, on light and on dark paper: viridis' hues, their lightness rising so that they
  // read without colour.
  const ramps = [
    [[68, 1, 84], [62, 60, 140], [28, 105, 145], [15, 130, 100], [95, 140, 20]],
    [[150, 110, 215], [95, 150, 225], [50, 185, 175], [120, 215, 110], [253, 231, 37]],
  ];
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  function shade(share) {
    const ramp = ramps[+dark.matches];
    const place = Math.min(Math.max(share, 0), 1) * (ramp.length - 1), start = Math.min(Math.floor(place), ramp.length - 2);
    const [a, b] = [ramp[start], ramp[start + 1]];
    return "rgb(" + a.map((each, k) => Math.round(each + (place - start) * (b[k] - each))).join(",") + ")";
  }

  const height = (loss) => {
    const [low, high] = [info.low, info.high];
    if (!(high > low)) return 0;
    const share = logarithmic ? Math.log(loss / low) / Math.log(high / low) : (loss - low) / (high - low);
    return Math.min(Math.max(share, 0), 1);
  };

  function projection(width, tall) {
    const cy = Math.cos(yaw), sy = Math.sin(yaw), cp = Math.cos(pitch), sp = Math.sin(pitch), size = Math.min(width / 1.85, tall / 1.5);
    return (x, y, z) => { // x, y in [-1/2, 1/2], z in [0, 1]
      const right = x * cy - y * sy, away = x * sy + y * cy, up = (z - 0.45) * 0.72;
      return [width / 2 + right * size, tall / 2 - (away * sp + up * cp) * size, away * cp - up * sp];
    };
  }

  function paint(canvas) {
    const surface = info.surfaces[+canvas.dataset.surface], n = surface.side, ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, tall = canvas.clientHeight;
    if (!width) return;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(tall * ratio);
    const pen = canvas.getContext("2d"), style = getComputedStyle(canvas), at = projection(width, tall);
    const ink = style.getPropertyValue("--ink"), soft = style.getPropertyValue("--soft"), rule = style.getPropertyValue("--rule");
    pen.scale(ratio, ratio);
    const path = (points) => {
      pen.beginPath();
      points.forEach(([x, y], k) => (k ? pen.lineTo(x, y) : pen.moveTo(x, y)));
    };
    const corners = [[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]];
    pen.strokeStyle = rule;
    path([...corners, corners[0]].map(([x, y]) => at(x, y, 0)));
    pen.stroke();

    const vertex = (i, j) => at(i / (n - 1) - 0.5, j / (n - 1) - 0.5, height(surface.loss[i * n + j]));
    const cells = [];
    for (let i = 0; i < n - 1; i += 1) {
      for (let j = 0; j < n - 1; j += 1) {
        const points = [vertex(i, j), vertex(i + 1, j), vertex(i + 1, j + 1), vertex(i, j + 1)];
        const places = [i * n + j, (i + 1) * n + j, (i + 1) * n + j + 1, i * n + j + 1];
        const tone = places.reduce((sum, place) => sum + height(surface.loss[place]), 0) / 4;
        cells.push([points.reduce((sum, point) => sum + point[2], 0), points, tone]);
      }
    }
    cells.sort((a, b) => b[0] - a[0]);
    pen.lineWidth = 0.5;
    cells.forEach(([, points, tone]) => {
      path(points);
      pen.closePath();
      pen.fillStyle = shade(tone);
      pen.fill();
      pen.strokeStyle = "rgba(0,0,0,.22)";
      pen.stroke();
    });
    marks(pen, at, corners, surface, n, ink, soft);
  }

  function marks(pen, at, corners, surface, n, ink, soft) {
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = soft;
    pen.strokeStyle = soft;
    pen.textAlign = "center";
    const edges = [["direction 1", 0, -0.62], ["direction 1", 0, 0.62], ["direction 2", -0.62, 0], ["direction 2", 0.62, 0]];
    const near = edges.map((edge) => [...edge, at(edge[1], edge[2], 0)]).sort((a, b) => a[3][2] - b[3][2]).slice(0, 2);
    near.forEach(([text, , , [x, y]]) => pen.fillText(text, x, y + 6));
    const left = corners.map(([x, y]) => [x, y, at(x, y, 0)[0]]).sort((a, b) => a[2] - b[2])[0];
    const foot = at(left[0], left[1], 0), top = at(left[0], left[1], 1);
    pen.beginPath();
    pen.moveTo(foot[0], foot[1]);
    pen.lineTo(top[0], top[1]);
    pen.stroke();
    pen.textAlign = "right";
    [[0, info.low], [1, info.high]].forEach(([z, loss]) => {
      const [x, y] = at(left[0], left[1], z);
      const text = String(Number(loss.toPrecision(3)));
      pen.fillText(text, Math.max(x - 4, pen.measureText(text).width + 1), y + 4);
    });
    const middle = (n - 1) / 2;
    if (Number.isInteger(middle)) {
      const [x, y] = at(0, 0, height(surface.loss[middle * n + middle]));
      pen.beginPath();
      pen.arc(x, y, 3.5, 0, 2 * Math.PI);
      pen.fillStyle = "#fff";
      pen.fill();
      pen.strokeStyle = ink === "" ? "#000" : "#111";
      pen.lineWidth = 1.5;
      pen.stroke();
    }
  }

  function repaint() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; canvases.forEach(paint); });
  }

  function turn(dy, dp) {
    yaw += dy;
    pitch = Math.min(1.5, Math.max(0.08, pitch + dp));
    repaint();
  }

  canvases.forEach((canvas) => {
    let last = null;
    canvas.addEventListener("pointerdown", (event) => { last = event; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => {
      if (!last) return;
      turn((event.clientX - last.clientX) * 0.01, (event.clientY - last.clientY) * 0.01);
      last = event;
    });
    ["pointerup", "pointercancel"].forEach((name) => canvas.addEventListener(name, () => { last = null; }));
    canvas.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: [-0.1, 0], ArrowRight: [0.1, 0], ArrowUp: [0, 0.1], ArrowDown: [0, -0.1] };
      if (event.key === "Home") { ({ yaw, pitch } = START); repaint(); } else if (steps[event.key]) turn(...steps[event.key]);
      else return;
      event.preventDefault();
    });
  });
  document.querySelectorAll('input[name="height"]').forEach((input) => input.addEventListener("change", () => {
    logarithmic = input.value === "log";
    repaint();
  }));
  dark.addEventListener("change", repaint);
  window.addEventListener("resize", repaint);
  repaint();
})();
