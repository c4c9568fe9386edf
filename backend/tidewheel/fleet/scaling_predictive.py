"""Scaling ahead of a forecast, by the time that a replica takes to start."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tidewheel.fleet.arrival_forecast import ArrivalBuckets, ArrivalForecast, ForecastSettings
from tidewheel.fleet.scaling import Decision, FleetState, ScalingSettings
from tidewheel.fleet.scaling_load import Work, WorkMeter
from tidewheel.fleet.scaling_reactive import Need, Steady, current_need, work_need


class Predictive:
    """Plan for the largest arrivals forecast for the time to start a replica, and for what is asked now.

    It decides as `Reactive` does while the forecast's recent error is large, or less than a season was seen, or a
    replica's capacity is unknown. While it trusts the forecast it scales down sooner, after the time to start a
    replica or a bucket, because what is needed again by then is known.
    """

    def __init__(
        self, settings: ScalingSettings, forecast: ForecastSettings | None = None, history: Iterable[float] = ()
    ) -> None:
        """`history`: arrivals of earlier buckets, whose last one ends with the first state."""
        forecast = forecast or ForecastSettings()
        self._settings = settings
        self._bucket_s = forecast.bucket_s
        self._lead = math.ceil(settings.startup_s / forecast.bucket_s) + 1  # the bucket that has begun, and the start
        self._buckets = ArrivalBuckets(forecast.bucket_s)
        self._meter = WorkMeter(settings)
        self._steady = Steady(settings)
        self.forecast = ArrivalForecast(forecast, lead=self._lead)
        self.forecast.learn(history)

    def decide(self, state: FleetState) -> Decision:
        work = self._meter.observe(state)
        self.forecast.learn(self._buckets.add(state.now, state.num_arrivals))
        need = current_need(self._settings, state, work)
        if not (self.forecast.is_reliable and work.is_firm and work.tokens_per_request):
            return self._steady.settle(state, need, self._settings.scale_down_after_s)
        ahead = self._need_ahead(work)
        least = max(ahead, need, key=lambda part: part.least)
        both = Need(least.least, max(ahead.least, need.most), least.reason)
        hold_s = min(max(self._settings.startup_s, self._bucket_s), self._settings.scale_down_after_s)
        return self._steady.settle(state, both, hold_s)

    def _need_ahead(self, work: Work) -> Need:
        arrivals = max(self.forecast.ahead(buckets) for buckets in range(1, self._lead + 1))
        tokens_per_s = arrivals / self._bucket_s * work.tokens_per_request
        need = work_need(self._settings, tokens_per_s, work.replica_tokens_per_s)
        return need._replace(reason=f"{arrivals / self._bucket_s:.3g} requests/s are forecast")
