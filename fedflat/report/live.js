"use strict";
(() => {
  const state = document.getElementById("state"), query = location.search;
  let seen = "";
  // Without a script the page loads itself again, so there is nothing to choose: the buttons are shown from here.
  const offer = (spent) => {
    const axis = document.querySelector("fieldset.axis");
    if (axis) axis.hidden = false;
    if (axis && spent) document.getElementById("axis-epsilon").checked = true;
  };
  const look = async () => {
    const answer = await fetch("body" + query + "&seen=" + encodeURIComponent(seen));
    if (answer.status !== 200) return;
    const news = await answer.text(), chosen = document.getElementById("axis-epsilon");
    seen = answer.headers.get("Stamp");
    document.getElementById("live").innerHTML = news;
    offer(chosen !== null && chosen.checked);
    state.textContent = "last news at " + new Date().toLocaleTimeString();
  };
  const follow = async () => {
    try { await look(); } catch { state.textContent = "no connection: the page shows what was known last"; }
    setTimeout(follow, 1000);
  };
  offer(false);
  follow();
})();
