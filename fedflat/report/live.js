"use strict";
(() => {
  const state = document.getElementById("state"), query = location.search;
  const events = new EventSource("events" + query);
  // Without a script the page loads itself again, so there is nothing to choose: the buttons are shown from here.
  const offer = (spent) => {
    const axis = document.querySelector("fieldset.axis");
    if (axis) axis.hidden = false;
    if (axis && spent) document.getElementById("axis-epsilon").checked = true;
  };
  offer(false);
  events.onmessage = async () => {
    const answer = await fetch("body" + query);
    if (!answer.ok) return;
    const news = await answer.text(), chosen = document.getElementById("axis-epsilon");
    document.getElementById("live").innerHTML = news;
    offer(chosen !== null && chosen.checked);
    state.textContent = "last news at " + new Date().toLocaleTimeString();
  };
  events.onerror = () => { state.textContent = "no connection: the page shows what was known last"; };
})();
