package stack

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/common/expfmt"
	prommodel "github.com/prometheus/common/model"
)

// get requests a page and passes it to read. The program must answer within ten seconds.
func get(ctx context.Context, url string, read func(io.Reader) error) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answered %s", url, resp.Status)
	}
	return read(resp.Body)
}

func getJSON(ctx context.Context, url string, v any) error {
	return get(ctx, url, func(page io.Reader) error { return json.NewDecoder(page).Decode(v) })
}

// ReadMetrics reads a page of metrics into a map from name{label="value",...} to the value. A histogram counts as its
// number of observations.
func ReadMetrics(ctx context.Context, url string) (map[string]float64, error) {
	values := map[string]float64{}
	return values, get(ctx, url, func(page io.Reader) error {
		parser := expfmt.NewTextParser(prommodel.UTF8Validation)
		families, err := parser.TextToMetricFamilies(page)
		if err != nil {
			return err
		}
		for name, family := range families {
			for _, m := range family.Metric {
				var labels []string
				for _, l := range m.Label {
					labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
				}
				key := name
				if len(labels) > 0 {
					key += "{" + strings.Join(labels, ",") + "}"
				}
				values[key] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(
					m.GetHistogram().GetSampleCount(),
				)
			}
		}
		return nil
	})
}
