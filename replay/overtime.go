package replay

import "time"

// periods is how many periods overTime divides a replay into at most; at least half of them are used.
const periods = 64

// overTime counts how busy each worker was in each period of a replay. The replay's length is not known before its end,
// so periods double in length whenever they do not suffice.
type overTime struct {
	length  time.Duration      // of a period
	workers [][periods]float64 // seconds
	used    int                // periods
}

func newOverTime(workers int) overTime {
	return overTime{length: time.Second, workers: make([][periods]float64, workers)}
}

// add counts the time of a step by its beginning.
func (o *overTime) add(w int, at, took time.Duration) {
	for at/o.length >= periods {
		for i := range o.workers {
			p := &o.workers[i]
			for k := range periods / 2 {
				p[k] = p[2*k] + p[2*k+1]
			}
			clear(p[periods/2:])
		}
		o.length *= 2
		o.used = (o.used + 1) / 2
	}
	k := int(at / o.length)
	o.workers[w][k] += took.Seconds()
	o.used = max(o.used, k+1)
}

// ahead returns how much more of each period, 0..1, the busiest worker was busy than the mean of all.
func (o *overTime) ahead() (each []float64) {
	for k := range o.used {
		sum, most := 0.0, 0.0
		for i := range o.workers {
			sum += o.workers[i][k]
			most = max(most, o.workers[i][k])
		}
		each = append(each, min((most-sum/float64(len(o.workers)))/o.length.Seconds(), 1))
	}
	return each
}
