"use strict";
(() => {
  const state = document.getElementById("state"), query = location.search;
  const events = new EventSource("events" + query);
  events.onmessage = async () => {
    const answer = await fetch("body" + query);
    if (!answer.ok) return;
    document.getElementById("live").innerHTML = await answer.text();
    state.textContent = "last news at " + new Date().toLocaleTimeString();
  };
  events.onerror = () => { state.textContent = "no connection: the page shows what was known last"; };
})();
